#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "dist/fragile.hpp"
#include "dist/settings.hpp"

namespace lockstep::test {
namespace {

using nlohmann::json;

class ObjectsTest : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void()>& body) { run_as(GetParam(), body); }
};

class ObjectsBetweenRanksTest : public ObjectsTest {};

INSTANTIATE_TEST_SUITE_P(Ranks, ObjectsTest, ::testing::ValuesIn(few_ranks()),
                         [](const auto& test) { return name_of(test.param); });
INSTANTIATE_TEST_SUITE_P(Ranks, ObjectsBetweenRanksTest, ::testing::ValuesIn(few_ranks(2)),
                         [](const auto& test) { return name_of(test.param); });

/// What a user would write.
struct Detection {
  std::string image;
  std::vector<float> box;
  std::optional<int> label;

  template <class Archive>
  void serialize(Archive& archive) {
    archive(image, box, label);
  }
  friend bool operator==(const Detection&, const Detection&) = default;
};

Detection detection_of(int rank) {
  return {.image = "image" + std::to_string(rank),
          .box = std::vector<float>(static_cast<std::size_t>(rank), 0.5F),
          .label = rank % 2 == 0 ? std::optional(rank) : std::nullopt};
}

json mixed(int rank) {
  if (rank == 0) return json::parse(R"(["foo", 12, {"1": 2}])");
  if (rank == 1) return json::parse(R"(["bar", 20, {"1": 3}])");
  return rank;
}

TEST_P(ObjectsTest, all_gather_object) {
  run([] {
    const auto all = all_gather_object(detection_of(get_rank()));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(get_world_size()));
    for (int r = 0; r < get_world_size(); ++r) {
      EXPECT_EQ(all[static_cast<std::size_t>(r)], detection_of(r));
    }
  });
}

TEST_P(ObjectsTest, all_gather_object_of_mixed_json) {
  run([] {
    const auto all = all_gather_object(mixed(get_rank()));
    ASSERT_EQ(all.size(), static_cast<std::size_t>(get_world_size()));
    for (int r = 0; r < get_world_size(); ++r) {
      EXPECT_EQ(all[static_cast<std::size_t>(r)], mixed(r));
    }
  });
}

TEST_P(ObjectsTest, all_gather_object_of_sizes_from_nothing_to_megabytes) {
  run([] {
    const auto size_of_rank = [](int r) { return r == 0 ? 0 : (std::size_t{1} << (8 * r)) + 3; };
    const auto text_of = [&](int r) { return std::string(size_of_rank(r), char('a' + r)); };
    const auto all = all_gather_object(text_of(get_rank()));
    for (int r = 0; r < get_world_size(); ++r) {
      EXPECT_TRUE(all[static_cast<std::size_t>(r)] == text_of(r));
    }
  });
}

TEST_P(ObjectsTest, gather_object_to_every_rank) {
  run([] {
    for (int dst = 0; dst < get_world_size(); ++dst) {
      const auto all = gather_object(mixed(get_rank()), dst);
      ASSERT_EQ(all.has_value(), get_rank() == dst);
      if (!all) continue;
      ASSERT_EQ(all->size(), static_cast<std::size_t>(get_world_size()));
      for (int r = 0; r < get_world_size(); ++r) {
        EXPECT_EQ((*all)[static_cast<std::size_t>(r)], mixed(r));
      }
    }
  });
}

TEST_P(ObjectsTest, broadcast_object_from_every_rank) {
  run([] {
    for (int src = 0; src < get_world_size(); ++src) {
      Detection object = detection_of(get_rank());
      broadcast_object(object, src);
      EXPECT_EQ(object, detection_of(src));
    }
  });
}

TEST_P(ObjectsTest, broadcast_object_list) {
  run([] {
    for (int src = 0; src < get_world_size(); ++src) {
      std::vector<json> list = {get_rank(), "text", mixed(get_rank())};
      const json* const place = list.data();
      broadcast_object_list(list, src);
      EXPECT_EQ(list, (std::vector<json>{src, "text", mixed(src)}));
      EXPECT_EQ(list.data(), place);  // in place
    }
    std::vector<int> none;
    broadcast_object_list(none);
    EXPECT_TRUE(none.empty());
  });
}

TEST_P(ObjectsTest, ranks_are_the_groups_own) {
  run([] {
    // The last rank of the world is rank 0 here.
    const Group reversed = default_group().split(/*color=*/0, /*key=*/-get_rank());
    const auto all = all_gather_object(get_rank(), reversed);
    EXPECT_EQ(all.front(), get_world_size() - 1);
    std::string text = "from " + std::to_string(get_rank());
    broadcast_object(text, /*src=*/0, reversed);
    EXPECT_EQ(text, "from " + std::to_string(get_world_size() - 1));
    EXPECT_EQ(gather_object(get_rank(), /*dst=*/0, reversed).has_value(), reversed.rank() == 0);
    EXPECT_EQ(collect_results(std::vector{get_rank()}, 1, reversed).has_value(),
              reversed.rank() == 0);

    // Without the world's rank 0 in the group.
    const Group half = default_group().split(get_rank() % 2);
    EXPECT_EQ(all_gather_object(get_rank(), half).front(), get_rank() % 2);
  });
}

TEST_P(ObjectsTest, roots_outside_the_group) {
  run([] {
    int value = 1;
    EXPECT_CONTAINS(thrown<UsageError>([&] { broadcast_object(value, get_world_size()); }),
                    "src is ");
    EXPECT_CONTAINS(thrown<UsageError>([] { gather_object(1, -1); }), "dst is -1");
    barrier();
  });
}

TEST_P(ObjectsTest, an_object_that_one_rank_cannot_send_fails_on_all_and_leaves_the_group_usable) {
  run([] {
    const int last = get_world_size() - 1;
    Fragile object{get_rank() == last ? "unsendable" : "mine"};
    std::vector<Fragile> list{object};
    const std::function<void()> calls[] = {
        [&] { (void)all_gather_object(object); }, [&] { (void)gather_object(object); },
        [&] { broadcast_object(object, last); }, [&] { broadcast_object_list(list, last); }};
    for (const auto& call : calls) {
      if (get_rank() == last) {
        EXPECT_CONTAINS(thrown<std::runtime_error>(call), "this one does not travel");
      } else {
        const std::string text = thrown<PeerFailed>(call);
        EXPECT_CONTAINS(text, "rank " + std::to_string(last) + " failed: this one does not travel");
        EXPECT_CONTAINS(text, ", at objects_test.cpp:");
      }
      EXPECT_EQ(all_reduce_value(1), get_world_size());
    }
  });
}

TEST_P(ObjectsTest, a_rank_of_another_type) {
  run([] {
    const int last = get_world_size() - 1;
    if (last == 0) return;
    const auto refused = thrown<MismatchError>([last] {
      if (get_rank() == last) {
        all_gather_object(std::string("text"));
      } else {
        all_gather_object(std::vector<int>{1});
      }
    });
    EXPECT_CONTAINS(refused, "all_gather_object on group 'world'");
    EXPECT_CONTAINS(refused, "objects_test.cpp");
    EXPECT_CONTAINS(refused, "rank 0 has std::vector<int");
    EXPECT_CONTAINS(refused, "rank " + std::to_string(last) + " has std::");
    EXPECT_CONTAINS(refused, "string");
    EXPECT_EQ(all_reduce_value(1), get_world_size());  // the group stays usable
  });
}

TEST_P(ObjectsBetweenRanksTest, ranks_that_call_different_functions) {
  run([] {
    int value = 1;
    EXPECT_CONTAINS(thrown<MismatchError>([&] {
                      if (get_rank() == 0) {
                        all_gather_object(value);
                      } else {
                        broadcast_object(value);
                      }
                    }),
                    "rank 0 has all_gather_object, rank 1 has broadcast_object");
    EXPECT_CONTAINS(thrown<MismatchError>([&] { broadcast_object(value, get_rank()); }),
                    "differ in src: rank 0 has 0, rank 1 has 1");
    EXPECT_CONTAINS(thrown<MismatchError>([&] { gather_object(value, get_rank()); }),
                    "differ in dst: rank 0 has 0, rank 1 has 1");
    barrier();
  });
}

TEST_P(ObjectsBetweenRanksTest, lists_of_different_lengths) {
  run([] {
    std::vector<int> list(static_cast<std::size_t>(3 + get_rank()), get_rank());
    const auto before = list;
    EXPECT_CONTAINS(thrown<MismatchError>([&] { broadcast_object_list(list); }),
                    "lengths of their lists: rank 0 has 3, rank 1 has 4");
    EXPECT_EQ(list, before);
    barrier();
  });
}

TEST_P(ObjectsTest, a_message_that_does_not_decode) {
  run([] {
    Fragile object{get_rank() == 0 ? "unreadable" : "mine"};
    if (get_rank() == 0) {
      broadcast_object(object);
    } else {
      const auto refused = thrown<MismatchError>([&] { broadcast_object(object); });
      EXPECT_CONTAINS(refused, "message of rank 0 cannot be decoded as ");
      EXPECT_CONTAINS(refused, "Fragile: this one does not arrive. The group stays usable");
      EXPECT_EQ(object.text, "mine");
    }
    barrier();
  });
}

/// Each rank reads another number of elements than were sent.
struct Greedy {
  std::map<std::string, std::vector<int>> numbers;
  template <class Archive>
  void save(Archive& archive) const {
    archive(numbers);
  }
  template <class Archive>
  void load(Archive& archive) {
    archive(numbers, numbers);
  }
};

TEST_P(ObjectsBetweenRanksTest, types_are_named_as_a_program_writes_them) {
  run([] {
    std::vector<Greedy> list(1);
    EXPECT_CONTAINS(thrown<MismatchError>([&] { static_cast<void>(all_gather_object(list)); }),
                    " cannot be decoded as std::vector<lockstep::test::Greedy>: it ends too early. "
                    "Do the ranks run different builds? The group stays usable");
    std::map<std::string, std::vector<int>> numbers;
    std::vector<std::string> texts;
    const auto differ = [&] {
      get_rank() == 0 ? broadcast_object(numbers) : broadcast_object(texts);
    };
    EXPECT_CONTAINS(thrown<MismatchError>(differ),
                    "rank 0 has std::map<std::string, std::vector<int>>, rank 1 has "
                    "std::vector<std::string>;");
    barrier();
  });
}

TEST_P(ObjectsTest, all_reduce_dict_of_scalars) {
  run([] {
    const int n = get_world_size();
    std::map<std::string, double> dict = {{"loss", get_rank()}, {"accuracy", 1}};
    all_reduce_dict(dict);
    EXPECT_EQ(dict, (std::map<std::string, double>{{"accuracy", n}, {"loss", n * (n - 1) / 2}}));
    std::map<std::string, std::int64_t> integers = {{"k", get_rank()}};
    all_reduce_dict(integers, ReduceOp::mean);
    EXPECT_EQ(integers["k"], (n - 1) / 2);
    std::map<std::string, float> none;
    all_reduce_dict(none);
    EXPECT_TRUE(none.empty());
  });
}

TEST_P(ObjectsTest, all_reduce_dict_of_vectors) {
  run([] {
    std::map<std::string, std::vector<std::int32_t>> dict = {
        {"a", {get_rank(), 2}}, {"b", {}}, {"c", {7}}};
    all_reduce_dict(dict, ReduceOp::max);
    EXPECT_EQ(dict["a"], (std::vector{get_world_size() - 1, 2}));
    EXPECT_TRUE(dict["b"].empty());
    EXPECT_EQ(dict["c"], std::vector{7});
  });
}

TEST_P(ObjectsTest, all_reduce_dict_of_unordered_maps) {
  run([] {
    const int n = get_world_size();
    std::unordered_map<std::string, std::vector<std::uint64_t>> dict;
    // Other buckets and another order of insertion on each rank.
    dict.rehash(static_cast<std::size_t>(7 + 50 * get_rank()));
    for (int i = 0; i < 20; ++i) {
      const int key = get_rank() % 2 == 0 ? i : 19 - i;
      dict[std::to_string(key)].assign(static_cast<std::size_t>(key % 3), 1U << key);
    }
    all_reduce_dict(dict);
    for (int key = 0; key < 20; ++key) {
      EXPECT_EQ(dict[std::to_string(key)],
                std::vector<std::uint64_t>(static_cast<std::size_t>(key % 3),
                                           static_cast<std::uint64_t>(n) << key));
    }
    std::map<std::string, bool> flags = {{"is_main", get_rank() == 0}, {"is_rank", true}};
    all_reduce_dict(flags, ReduceOp::band);
    EXPECT_EQ(flags, (std::map<std::string, bool>{{"is_main", n == 1}, {"is_rank", true}}));
  });
}

TEST_P(ObjectsBetweenRanksTest, dicts_of_different_keys_and_lengths) {
  run([] {
    std::map<std::string, std::vector<float>> dict = {{"same", {1}}, {"long", {1, 2}}};
    if (get_rank() == 1) {
      dict["extra"] = {1};
      dict["long"] = {1, 2, 3};
      dict.erase("same");
    }
    const auto before = dict;
    const auto refused = thrown<MismatchError>([&] { all_reduce_dict(dict); });
    EXPECT_CONTAINS(refused, "'same' is on rank 0 but not on rank 1");
    EXPECT_CONTAINS(refused, "'long' has 2 elements on rank 0 and 3 on rank 1");
    EXPECT_CONTAINS(refused, "'extra' is on rank 1 but not on rank 0");
    EXPECT_EQ(dict, before);
    EXPECT_EQ(all_reduce_value(1), get_world_size());  // the group stays usable

    std::map<std::string, int> scalars = {{"a", 1}};
    EXPECT_CONTAINS(thrown<MismatchError>([&] {
                      all_reduce_dict(scalars, get_rank() == 0 ? ReduceOp::sum : ReduceOp::max);
                    }),
                    "rank 0 reduces by sum, rank 1 by max");
    barrier();
  });
}

TEST_P(ObjectsTest, a_dict_reduced_by_what_its_type_cannot) {
  run([] {
    std::map<std::string, float> dict = {{"a", 1}};
    EXPECT_CONTAINS(thrown<UsageError>([&] { all_reduce_dict(dict, ReduceOp::bor); }),
                    "bit operations are for integers");
    barrier();
  });
}

/// 3 GiB would hold the machine for minutes: only where asked for.
TEST(LargeObjectsTest, three_gibibytes) {
  if (std::getenv("LOCKSTEP_TEST_LARGE") == nullptr) {
    GTEST_SKIP() << "needs 13 GiB of memory: set LOCKSTEP_TEST_LARGE=1";
  }
  run_as(
      {Form::processes, 2},
      [] {
        constexpr std::size_t kSize = (std::size_t{3} << 30U) + 5;
        std::string object(get_rank() == 0 ? 0 : kSize, 'x');
        if (get_rank() == 1) object.back() = 'y';
        const auto all = gather_object(object);
        if (!all) return;
        ASSERT_EQ((*all)[0].size(), 0U);
        ASSERT_EQ((*all)[1].size(), kSize);
        EXPECT_EQ((*all)[1].back(), 'y');
        EXPECT_EQ((*all)[1].find_first_not_of('x'), kSize - 1);
      },
      std::chrono::seconds(600));
}

}  // namespace
}  // namespace lockstep::test
