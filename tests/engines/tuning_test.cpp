#include "engines/shared/segment/tuning.hpp"
#include "support/expect.hpp"
#include "support/ranks.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <lockstep/error.hpp>
#include <lockstep/lockstep.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::test {
namespace {

/// LOCKSTEP_TUNE while it lives.
class Tuned {
 public:
  explicit Tuned(const char* text) { ::setenv("LOCKSTEP_TUNE", text, /*overwrite=*/1); }
  ~Tuned() { ::unsetenv("LOCKSTEP_TUNE"); }
  Tuned(const Tuned&) = delete;
  Tuned& operator=(const Tuned&) = delete;
};

TEST(TuningTest, text_replaces_what_was_measured) {
  const shared::Tuning measured = shared::tuning_for(3, {});
  const shared::Tuning tuning = shared::tuning_for(3, shared::parse_tuning("flat=100,chunk=9000"));
  EXPECT_EQ(tuning.flat_bytes, 100U);
  EXPECT_EQ(tuning.flat_bytes_oversubscribed, 100U);
  EXPECT_EQ(tuning.chunk_bytes, 8192U);  // whole pages, so whole elements
  EXPECT_EQ(tuning.in_place_bytes, measured.in_place_bytes);
  EXPECT_EQ(tuning.inline_bytes, measured.inline_bytes);
  EXPECT_EQ(shared::tuning_for(3, shared::parse_tuning("inplace=0")).in_place_bytes, 0U);
  EXPECT_EQ(shared::tuning_for(3, shared::parse_tuning("inline=7")).inline_bytes, 7U);
}

base::CpuModel model(std::string_view vendor, unsigned family, unsigned number,
                     std::size_t l2_bytes) {
  base::CpuModel cpu;
  vendor.copy(cpu.vendor.data(), cpu.vendor.size() - 1);
  cpu.family = family;
  cpu.model = number;
  cpu.l2_bytes = l2_bytes;
  return cpu;
}

TEST(TuningTest, a_chunk_of_any_cpu_is_of_whole_pages) {
  for (const std::string_view vendor : {"GenuineIntel", "AuthenticAMD", ""}) {
    for (const unsigned number : {0U, 17U, 84U, 85U, 200U}) {
      for (const unsigned family : {6U, 25U}) {
        for (const std::size_t l2_kib : {0U, 1U, 100U, 256U, 1024U, 65536U}) {
          const base::CpuModel cpu = model(vendor, family, number, l2_kib << 10);
          for (const int n_ranks : {2, 3, 64}) {
            const auto tuning = shared::default_tuning(n_ranks, cpu);
            EXPECT_GT(tuning.chunk_bytes, 0U) << vendor << " " << family << "/" << number;
            EXPECT_EQ(tuning.chunk_bytes % 4096, 0U) << vendor << " " << family << "/" << number;
          }
        }
      }
    }
  }
}

TEST(TuningTest, the_chunk_of_an_unknown_cpu_fits_its_cache) {
  std::uint64_t smaller = 0;
  for (const std::size_t l2_kib : {256, 400, 512, 1024, 2048, 65536}) {
    const std::uint64_t n_bytes =
        shared::default_tuning(2, model("unknown", 6, 1, l2_kib << 10)).chunk_bytes;
    // What a rank works on at once: its data, what it shows, what it reads, the result.
    EXPECT_LE(4 * n_bytes, l2_kib << 10);
    EXPECT_GE(n_bytes, smaller) << "of a larger cache";
    smaller = n_bytes;
  }
}

TEST(TuningTest, the_chunk_of_a_zen_does_not_depend_on_its_second_level) {
  for (const unsigned family : {0x17U, 0x19U, 0x1aU}) {
    const auto tuning = shared::default_tuning(4, model("AuthenticAMD", family, 1, 512U << 10));
    EXPECT_EQ(tuning.chunk_bytes, 256U << 10) << family;
    EXPECT_EQ(tuning.flat_bytes_oversubscribed, 32U << 10) << family;
  }
  EXPECT_EQ(shared::default_tuning(4, model("AuthenticAMD", 0x16, 1, 512U << 10)).chunk_bytes,
            32U << 10);
}

TEST(TuningTest, two_ranks_swap_slots_behind_the_first_line_except_on_zen) {
  const base::CpuModel zen = model("AuthenticAMD", 0x19, 1, 512U << 10);
  const base::CpuModel xeon = model("GenuineIntel", 6, 207, 2U << 20);
  EXPECT_EQ(shared::default_tuning(2, zen).inline_bytes, 248U);
  EXPECT_EQ(shared::default_tuning(2, xeon).inline_bytes, 56U);
  EXPECT_EQ(shared::default_tuning(3, xeon).inline_bytes, 248U);
  EXPECT_EQ(shared::default_tuning(2, model("AuthenticAMD", 0x16, 1, 0)).inline_bytes, 56U);
  EXPECT_EQ(shared::default_tuning(2, model("", 0, 0, 0)).inline_bytes, 56U);
}

TEST(TuningTest, ranks_with_a_core_each_leave_one_phase_sooner_the_more_they_are) {
  const base::CpuModel cpu = model("GenuineIntel", 6, 207, 2U << 20);
  EXPECT_EQ(shared::default_tuning(2, cpu).flat_bytes,
            shared::default_tuning(2, cpu).flat_bytes_oversubscribed);
  std::uint64_t more = 64U << 10;
  for (const int n_ranks : {3, 4, 8, 16}) {
    const auto tuning = shared::default_tuning(n_ranks, cpu);
    EXPECT_EQ(tuning.flat_bytes_oversubscribed, (256U << 10) / static_cast<std::uint64_t>(n_ranks));
    EXPECT_LT(tuning.flat_bytes, more) << n_ranks;
    more = tuning.flat_bytes;
  }
  EXPECT_EQ(shared::default_tuning(512, cpu).flat_bytes, 512U);
}

TEST(TuningTest, model_of_this_cpu) {
  const base::CpuModel cpu = base::cpu_model();
#if defined(__x86_64__)
  EXPECT_EQ(cpu.vendor_name().size(), 12U);
  EXPECT_GE(cpu.family, 6U);
#endif
  EXPECT_EQ(shared::tuning_for(2, {}).chunk_bytes, shared::default_tuning(2, cpu).chunk_bytes);
}

TEST(TuningTest, other_text_is_rejected) {
  for (const char* text : {"flat", "flat=", "flat=1k", "=1", "chunk=4095", "depth=2", "flat=1;",
                           "inline=249", "inline=", "inline=x"}) {
    try {
      shared::parse_tuning(text);
      ADD_FAILURE() << text << " was taken";
    } catch (const UsageError& error) {
      expect_contains(error.what(), "it takes inline=BYTES (at most 248), flat=BYTES");
    }
  }
}

/// Sums and a reduction to the last rank, of chunks that are full, odd and empty, in memory of both
/// kinds.
void expect_right_results(const Setting& setting) {
  const int n_ranks = setting.n_ranks;
  run_as(setting, [&] {
    for (const std::size_t count :
         {std::size_t{1}, std::size_t{30}, std::size_t{1024}, std::size_t{30'011}}) {
      const auto fill = [&](float* data) {
        std::iota(data, data + count, static_cast<float>(get_rank()));
      };
      const auto expected = [&](std::size_t i) {
        return static_cast<float>(n_ranks) *
               (static_cast<float>(i) + 0.5F * static_cast<float>(n_ranks - 1));
      };
      std::vector<float> values(count);
      SharedBuffer memory = default_group().allocate(count * sizeof(float));
      auto* const shared = reinterpret_cast<float*>(memory.data());
      const int last = n_ranks - 1;
      fill(values.data());
      reduce(std::span(values), last);
      for (std::size_t i = 0; get_rank() == last && i < count; ++i) {
        ASSERT_EQ(values[i], expected(i)) << i;
      }
      broadcast(values, last);  // through slots, or the flags' lines
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(values[i], expected(i)) << i;
      fill(values.data());
      fill(shared);
      all_reduce(std::span(values));
      all_reduce(std::span(shared, count));
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(values[i], expected(i)) << i;
        ASSERT_EQ(shared[i], expected(i)) << i;
      }
    }
  });
}

TEST(TuningTest, every_algorithm_gives_the_same_result) {
  for (const char* text :
       {"inline=0,flat=0,chunk=4096,inplace=0", "inline=56,flat=1000000000,chunk=4096",
        "inline=248,flat=0,chunk=1000000000,inplace=1000000000"}) {
    const Tuned tuned(text);
    SCOPED_TRACE(text);
    for (const Form form : {Form::threads, Form::processes}) {
      expect_right_results({form, 2});
      expect_right_results({form, 3});
    }
  }
}

}  // namespace
}  // namespace lockstep::test
