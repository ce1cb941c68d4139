#include "world/settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <lockstep/error.hpp>
#include <vector>

#include "group/check.hpp"
#include "group/step.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lockstep::internal {
namespace {

constexpr std::uint64_t kFlushResults = 1, kFlushOperands = 2, kRounding = 3 << 2;

struct Settings {
  std::uint64_t mode;
  bool was_member;
};

}  // namespace

std::uint64_t floating_point_mode() noexcept {
  std::uint64_t mode = 0;
#if defined(__x86_64__)
  const unsigned control = _mm_getcsr();
  if ((control & 0x8000U) != 0) mode |= kFlushResults;
  if ((control & 0x0040U) != 0) mode |= kFlushOperands;
  mode |= (control >> 13U & 3U) << 2U;
#elif defined(__aarch64__)
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  if ((control >> 24U & 1U) != 0) mode |= kFlushResults | kFlushOperands;
  mode |= (control >> 22U & 3U) << 2U;
#endif
  return mode;
}

std::string describe_mode(std::uint64_t mode) {
  std::string text;
  const auto add = [&text](const char* what) {
    text += (text.empty() ? "" : ", ") + std::string(what);
  };
  if ((mode & kFlushResults) != 0) add("flushes subnormal results to zero (FTZ)");
  if ((mode & kFlushOperands) != 0) add("treats subnormal operands as zero (DAZ)");
  if ((mode & kRounding) != 0) add("does not round to nearest");
  return text.empty() ? "uses the defaults of IEEE 754" : text;
}

namespace {

/// How rank r differs from the rank `of`; empty: not at all.
std::string difference(const std::vector<Settings>& all, std::size_t of, std::size_t r) {
  if (all[r].mode == all[of].mode) return {};
  return fmt::format(
      "the ranks' floating-point environments differ: rank {} {}, rank {} {}; results would differ "
      "between ranks. Make them equal before init_dist: a program or library built with "
      "-ffast-math or -Ofast changes its own at startup; so do fesetround, _mm_setcsr and "
      "torch::set_flush_denormal",
      of, describe_mode(all[of].mode), r, describe_mode(all[r].mode));
}

}  // namespace

void compare_settings(Engine& engine, const Call& barrier, bool was_member) {
  if (engine.size() == 1) return;
  const Settings mine{.mode = floating_point_mode(), .was_member = was_member};
  // A later error shows init_dist's barrier as the rank's last call.
  const std::vector<Settings> all = gather_values(engine, barrier_of(barrier), mine);
  const auto first = std::ranges::find(all, true, &Settings::was_member);
  const auto of = static_cast<std::size_t>(first == all.end() ? 0 : first - all.begin());
  const ErrorContext context = context_of(barrier, engine.rank());
  std::string rejection;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string text = difference(all, of, r);
    if (text.empty()) continue;
    const bool is_rejected = all[of].was_member && !all[r].was_member;
    if (!is_rejected) throw MismatchError(context, text);
    if (r == static_cast<std::size_t>(engine.rank())) {
      throw MismatchError(context, text + ". The others go on without this rank");
    }
    if (rejection.empty()) rejection = fmt::format("rank {} does not fit: {}", r, text);
  }
  if (!rejection.empty()) throw PeerFailed(context, rejection);
}

}  // namespace lockstep::internal
