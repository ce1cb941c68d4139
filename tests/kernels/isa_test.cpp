#include "kernels/isa.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <lockstep/env.hpp>
#include <lockstep/error.hpp>
#include <string>

namespace lockstep::kernels {
namespace {

/// In a fresh process, for the choice is made once: does LOCKSTEP_SIMD=text choose `want`?
void expect_choice(const char* text, Isa want) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("LOCKSTEP_SIMD", text, /*overwrite=*/1);
        try {
          Env::read();
        } catch (const UsageError&) {  // of another value
        }
        std::exit(chosen_isa() == want ? 0 : 1);
      },
      testing::ExitedWithCode(0), "")
      << "LOCKSTEP_SIMD=" << text;
}

Isa widest_up_to(Isa cap) {
  Isa widest = Isa::scalar;
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (isa <= cap && is_supported(isa)) widest = isa;
  }
  return widest;
}

TEST(IsaDeathTest, the_variable_caps_the_choice) {
  for (const Isa cap : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    expect_choice(std::string(name_of(cap)).c_str(), widest_up_to(cap));
  }
}

TEST(IsaDeathTest, another_value_caps_nothing) { expect_choice("sse9", widest_up_to(Isa::avx512)); }

}  // namespace
}  // namespace lockstep::kernels
