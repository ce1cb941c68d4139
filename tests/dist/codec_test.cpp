// The decoder is given every truncation and many damaged forms of valid messages: it throws, or
// reads another value; it never crashes (the sanitizers' builds look) and never takes much memory.

#include <gtest/gtest.h>

#include <lockstep/detail/codec.hpp>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <nlohmann/json.hpp>
#include <random>

#include "dist/settings.hpp"

namespace lockstep::detail {
namespace {

using nlohmann::json;
using test::expect_contains;

struct Empty {
  friend bool operator==(const Empty&, const Empty&) = default;
};

struct Tree {
  std::vector<Tree> children;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(children);
  }
};

using Everything =
    std::tuple<std::map<std::string, std::vector<double>>, std::optional<std::string>,
               std::variant<int, std::string, std::vector<bool>>, std::set<std::int64_t>, json,
               std::array<float, 3>, std::unordered_map<int, std::pair<bool, char>>,
               std::deque<std::list<int>>>;

Everything everything() {
  return {{{"loss", {1, 2.5}}, {"", {}}},
          "text",
          std::vector{true, false, true},
          {-3, 7},
          json::parse(R"(["foo", 12, {"1": 2}, null, -1.5, true])"),
          {1, 2, 3},
          {{1, {true, 'x'}}},
          {{1, 2}, {}}};
}

template <class T>
Bytes encoded(const T& object) {
  Bytes bytes;
  encode(bytes, object);
  return bytes;
}

template <class T>
T round_trip(const T& object) {
  T back;
  const Bytes bytes = encoded(object);
  decode(bytes.span(), back);
  return back;
}

TEST(CodecTest, round_trip) {
  EXPECT_EQ(round_trip(everything()), everything());
  EXPECT_EQ(round_trip(std::string()), "");
  EXPECT_EQ(round_trip(std::vector<Float16>{Float16(1.5F)})[0], Float16(1.5F));
  EXPECT_EQ(round_trip(std::vector<std::monostate>(5)).size(), 5U);
}

TEST(CodecTest, elements_of_no_bytes) {
  EXPECT_EQ(round_trip(std::vector<Empty>(1000)).size(), 1000U);
  EXPECT_EQ(round_trip(std::vector<std::vector<Empty>>(3, std::vector<Empty>(7)))[2].size(), 7U);
}

TEST(CodecTest, every_kind_of_json) {
  json value = {{"null", nullptr},
                {"small", -1},
                {"large", std::uint64_t{1} << 63U},
                {"not a number", std::numeric_limits<double>::infinity()},
                {"not UTF-8", "\xff\xfe"},
                {"bytes", json::binary({1, 2, 3}, 42)},
                {"plain bytes", json::binary({})},
                {"nested", {1, {2, {3, json::array(), json::object()}}}}};
  const json back = round_trip(value);
  EXPECT_EQ(back, value);
  EXPECT_EQ(back["large"].type(), json::value_t::number_unsigned);
  EXPECT_TRUE(back["bytes"].get_binary().has_subtype());
  EXPECT_FALSE(back["plain bytes"].get_binary().has_subtype());
}

TEST(CodecTest, every_truncation_is_rejected) {
  const Bytes bytes = encoded(everything());
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    Everything back;
    EXPECT_THROW(decode(bytes.span().first(n), back), std::exception) << n;
  }
}

TEST(CodecTest, bytes_left_over_are_rejected) {
  // The last 8 bytes say how many are padding: more than there are, or fewer.
  for (const char* const last : {"12345678", "\0\0\0\0\0\0\0\0"}) {
    Bytes bytes = encoded(everything());
    bytes.append(last, 8);
    Everything back;
    EXPECT_THROW(decode(bytes.span(), back), std::exception);
  }
}

TEST(CodecTest, flipped_bits_never_crash_the_decoder) {
  const Bytes bytes = encoded(everything());
  int n_refused = 0;
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes damaged;
    damaged.append(bytes.data(), bytes.size());
    damaged.data()[bit / 8] ^= std::byte{1} << (bit % 8);
    Everything back;
    try {
      decode(damaged.span(), back);
    } catch (const std::exception&) {
      ++n_refused;
    }
  }
  EXPECT_GT(n_refused, 0);
}

TEST(CodecTest, random_bytes_never_crash_the_decoder) {
  std::mt19937 random(1);
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes;
    for (auto n = random() % 64; n > 0; --n) {
      // Mostly small values: they pass for sizes.
      const auto byte = static_cast<std::uint8_t>(random() % 3 == 0 ? random() : random() % 4);
      bytes.append(&byte, 1);
    }
    Everything back;
    try {
      decode(bytes.span(), back);
    } catch (const std::exception&) {
    }
    json value;
    try {
      decode(bytes.span(), value);
    } catch (const std::exception&) {
    }
  }
}

TEST(CodecTest, a_size_of_more_than_the_bytes_left) {
  Bytes bytes = encoded(std::vector<int>{1, 2, 3});
  const std::uint64_t size = std::uint64_t{1} << 40U;
  std::memcpy(bytes.data(), &size, sizeof size);
  std::vector<int> back;
  expect_contains(test::thrown<std::runtime_error>([&] { decode(bytes.span(), back); }),
                  "a container claims 1099511627776 elements");
  EXPECT_EQ(back.capacity(), 0U);
}

TEST(CodecTest, nesting_has_a_limit_on_both_sides) {
  Tree deep;
  for (int i = 0; i < 3000; ++i) {
    Tree parent;
    parent.children.push_back(std::move(deep));
    deep = std::move(parent);
  }
  expect_contains(test::thrown<UsageError>([&] { encoded(deep); }), "nests deeper than 2000");

  Bytes bytes;  // [[[[...
  for (int i = 0; i < 1'000'000; ++i) {
    const std::uint64_t one = 1;
    bytes.append("\7", 1);  // array
    bytes.append(&one, sizeof one);
  }
  json value;
  expect_contains(test::thrown<std::runtime_error>([&] { decode(bytes.span(), value); }),
                  "nests deeper than 2000");
  Tree tree;
  EXPECT_THROW(decode(bytes.span().subspan(1), tree), std::exception);
}

TEST(CodecTest, an_object_as_deep_as_may_be) {
  json deep = 1;
  for (int i = 0; i < kMaxDepth - 2; ++i) deep = json::array({std::move(deep)});
  EXPECT_EQ(round_trip(deep), deep);
}

TEST(CodecTest, every_flaw_of_a_message_is_found) {
  const Bytes bytes = encoded(everything());
  const MessageHeader header = seal({.type = fingerprint(typeid(Everything))}, bytes.span());
  EXPECT_EQ(defect_of(header, bytes.span()), "");
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes.data()[bit / 8] ^= std::byte{1} << (bit % 8);
    expect_contains(defect_of(header, bytes.span()), "checksum");
    bytes.data()[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  for (std::size_t n = 0; n < bytes.size(); ++n) {
    expect_contains(defect_of(header, bytes.span().first(n)), "bytes where its header says");
  }
  MessageHeader other = header;
  other.magic = 1;
  expect_contains(defect_of(other, bytes.span()), "is not a serialised object");
  other = header;
  other.version = 9;
  expect_contains(defect_of(other, bytes.span()), "version 9");
}

TEST(CodecTest, fingerprints_tell_types_apart) {
  EXPECT_NE(fingerprint(typeid(int)), fingerprint(typeid(long)));
  EXPECT_NE(fingerprint(typeid(std::vector<int>)), fingerprint(typeid(std::vector<float>)));
  EXPECT_EQ(fingerprint(typeid(Tree)), fingerprint(typeid(Tree)));
}

TEST(CodecTest, bytes_grow_and_keep_what_they_hold) {
  Bytes bytes;
  for (int i = 0; i < 100'000; ++i) bytes.append(&i, sizeof i);
  for (int i = 0; i < 100'000; ++i) {
    int value = 0;
    std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof i, sizeof i);
    ASSERT_EQ(value, i);
  }
  bytes.append(nullptr, 0);
  EXPECT_EQ(bytes.size(), 400'000U);
}

}  // namespace
}  // namespace lockstep::detail
