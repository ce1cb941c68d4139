// What mmengine.dist's published tests ask of each function, not distributed and with two ranks,
// asked of ours: the same cases, with arguments of our types. A case runs on every rank of a world
// of one or two, whatever engine carries it; an engine joins by a line in `settings`.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <lockstep/lockstep.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dist/settings.hpp"
#include "support/temporary_folder.hpp"

namespace lockstep::test {
namespace {

using nlohmann::json;
using Longs = std::vector<std::int64_t>;
using Floats = std::vector<float>;

class MmengineCases : public ::testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void(int rank, bool is_pair)>& body) {
    run_as(GetParam(), [&] { body(get_rank(), get_world_size() == 2); });
  }
};

std::vector<Setting> mmengine_settings() {
#ifdef LOCKSTEP_CONFORMANCE_GLOO  // in nn_tests
  return {{Form::gloo, 1}, {Form::gloo, 2}, {Form::gloo_hosts, 2}};
#endif
  // Under mpirun, of one or two ranks.
  if (std::getenv("LOCKSTEP_TEST_BACKEND") != nullptr) return {{Form::launched, 0}};
  return {{Form::solo, 1}, {Form::threads, 2}, {Form::processes, 2}, {Form::hosts, 2}};
}

INSTANTIATE_TEST_SUITE_P(Engines, MmengineCases, ::testing::ValuesIn(mmengine_settings()),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(MmengineCases, who_am_i) {
  const Setting setting = GetParam();
  run([setting](int rank, bool is_pair) {
    EXPECT_EQ(is_distributed(), setting.form != Form::solo);
    EXPECT_EQ(get_backend().has_value(), setting.form != Form::solo);
    EXPECT_EQ(get_world_size(), is_pair ? 2 : 1);
    EXPECT_TRUE(rank == 0 || (is_pair && rank == 1));
    EXPECT_EQ(get_local_size(), is_pair ? 2 : 1);
    EXPECT_EQ(get_local_rank(), get_rank(local_group()));
    const auto [info_rank, info_size] = get_dist_info();
    EXPECT_EQ(info_rank, rank);
    EXPECT_EQ(info_size, is_pair ? 2 : 1);
    EXPECT_EQ(is_main_process(), rank == 0);
  });
}

TEST_P(MmengineCases, master_only) {
  run([](int rank, bool /*is_pair*/) {
    int n_calls = 0;
    lockstep::master_only([&] { ++n_calls; })();
    EXPECT_EQ(n_calls, rank == 0 ? 1 : 0);
  });
}

TEST_P(MmengineCases, barrier) {
  run([](int /*rank*/, bool /*is_pair*/) { EXPECT_NO_THROW(lockstep::barrier()); });
}

TEST_P(MmengineCases, all_reduce) {
  run([](int rank, bool is_pair) {
    Longs whole = rank == 0 ? Longs{5, 7} : Longs{8, -2};
    lockstep::all_reduce(whole, ReduceOp::sum);
    EXPECT_EQ(whole, (is_pair ? Longs{13, 5} : Longs{5, 7}));
    Floats real = rank == 0 ? Floats{5, 7} : Floats{8, -2};
    lockstep::all_reduce(real, ReduceOp::mean);
    EXPECT_EQ(real, (is_pair ? Floats{6.5F, 2.5F} : Floats{5, 7}));
    Longs truncated = rank == 0 ? Longs{5, -7} : Longs{8, 2};
    lockstep::all_reduce(truncated, parse_reduce_op("MEAN"));  // in any case, as there
    EXPECT_EQ(truncated, (is_pair ? Longs{6, -2} : Longs{5, -7}));
  });
}

TEST_P(MmengineCases, all_gather) {
  run([](int rank, bool is_pair) {
    const Longs mine = {rank, rank + 10};
    std::vector<Longs> expected = {{0, 10}};
    if (is_pair) expected.push_back({1, 11});
    EXPECT_EQ(lockstep::all_gather(mine), expected);
  });
}

TEST_P(MmengineCases, gather) {
  run([](int rank, bool is_pair) {
    std::vector<Longs> expected;
    if (rank == 0) expected.push_back({0, 10});
    if (rank == 0 && is_pair) expected.push_back({1, 11});
    EXPECT_EQ(lockstep::gather(Longs{rank, rank + 10}), expected);
  });
}

TEST_P(MmengineCases, broadcast) {
  run([](int rank, bool /*is_pair*/) {
    Longs data = rank == 0 ? Longs{3, 4} : Longs{1, 2};
    lockstep::broadcast(data, /*src=*/0);
    EXPECT_EQ(data, (Longs{3, 4}));
  });
}

TEST_P(MmengineCases, sync_random_seed) {
  run([](int /*rank*/, bool /*is_pair*/) {
    const std::uint64_t seed = lockstep::sync_random_seed();
    for (const std::uint64_t other : lockstep::all_gather_object(seed)) EXPECT_EQ(other, seed);
    EXPECT_NE(lockstep::sync_random_seed(), seed);
  });
}

const json kMixed = json::parse(R"(["foo", 12, {"1": 2}])");

TEST_P(MmengineCases, broadcast_object_list) {
  run([](int rank, bool /*is_pair*/) {
    std::vector<json> list(3);
    if (rank == 0) list = kMixed.get<std::vector<json>>();
    lockstep::broadcast_object_list(list);
    EXPECT_EQ(json(list), kMixed);
  });
}

TEST_P(MmengineCases, all_reduce_dict) {
  run([](int rank, bool is_pair) {
    std::map<std::string, Longs> whole = {{"a", {rank, 5}}, {"b", {rank, rank, 2}}};
    lockstep::all_reduce_dict(whole);
    if (is_pair) {
      EXPECT_EQ(whole, (std::map<std::string, Longs>{{"a", {1, 10}}, {"b", {1, 1, 4}}}));
    } else {
      EXPECT_EQ(whole, (std::map<std::string, Longs>{{"a", {0, 5}}, {"b", {0, 0, 2}}}));
    }
    std::map<std::string, Floats> real = {{"a", {static_cast<float>(rank), 5}}};
    lockstep::all_reduce_dict(real, ReduceOp::mean);
    EXPECT_EQ(real.at("a"), (is_pair ? Floats{0.5F, 5} : Floats{0, 5}));
  });
}

json object_of(int rank) { return rank == 0 ? json("foo") : json{{"1", 2}}; }

std::vector<json> objects_of(bool is_pair) {
  std::vector<json> all = {object_of(0)};
  if (is_pair) all.push_back(object_of(1));
  return all;
}

TEST_P(MmengineCases, all_gather_object) {
  run([](int rank, bool is_pair) {
    EXPECT_EQ(lockstep::all_gather_object(object_of(rank)), objects_of(is_pair));
  });
}

TEST_P(MmengineCases, gather_object) {
  run([](int rank, bool is_pair) {
    const auto all = lockstep::gather_object(object_of(rank), /*dst=*/0);
    ASSERT_EQ(all.has_value(), rank == 0);
    EXPECT_EQ(all.value_or(objects_of(is_pair)), objects_of(is_pair));
  });
}

// Interleaved: the first of each rank, then the second of each.
TEST_P(MmengineCases, collect_results) {
  const auto check = [](const std::optional<std::vector<json>>& all, int rank, bool is_pair) {
    ASSERT_EQ(all.has_value(), rank == 0);
    if (!all) return;
    EXPECT_EQ(json(*all), json::parse(is_pair ? R"(["foo", 24, {"1": 2}, {"a": "b"}])"
                                              : R"(["foo", {"1": 2}])"));
  };
  const test::TemporaryFolder folder;
  run([&](int rank, bool is_pair) {
    const std::vector<json> mine = rank == 0 ? std::vector<json>{"foo", json{{"1", 2}}}
                                             : std::vector<json>{24, json{{"a", "b"}}};
    const std::size_t size = is_pair ? 4 : 2;
    check(lockstep::collect_results(mine, size), rank, is_pair);
    std::string common = folder.path();  // where mpirun started the ranks, each has made one
    lockstep::broadcast_object(common);
    check(lockstep::collect_results(mine, size, common), rank, is_pair);
    lockstep::barrier();
  });
  EXPECT_TRUE(std::filesystem::is_directory(folder.path())) << "the user's folder is gone";
}

}  // namespace
}  // namespace lockstep::test
