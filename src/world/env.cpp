#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <lockstep/env.hpp>

#include "base/number.hpp"
#include "engines/shared/segment/tuning.hpp"
#include "group/check.hpp"
#include "kernels/isa.hpp"
#include "world/variables.hpp"

namespace lockstep {

using internal::variable;

namespace {

std::optional<std::string> folder(const char* name) {
  auto path = variable(name);
  if (path && ::access(path->c_str(), W_OK | X_OK) != 0) {
    internal::reject(fmt::format("{} is '{}': {}; it takes an existing folder to write to", name,
                                 *path, std::strerror(errno)));
  }
  return path;
}

Check parse_check(const std::string& text) {
  for (const Check check : {Check::off, Check::light, Check::full}) {
    if (text == internal::name_of(check)) return check;
  }
  internal::reject(fmt::format("LOCKSTEP_CHECK is '{}'; it takes off, light or full", text));
}

/// The limit that LOCKSTEP_SIMD sets; nullopt if it has no such value.
std::optional<kernels::Isa> parse_simd(const std::optional<std::string>& text) {
  if (!text) return kernels::Isa::avx512;
  for (const auto isa : {kernels::Isa::scalar, kernels::Isa::avx2, kernels::Isa::avx512}) {
    if (*text == kernels::name_of(isa)) return isa;
  }
  return std::nullopt;
}

/// When the program is loaded: it may use kernels before init_dist, or never call that.
[[maybe_unused]] const bool is_limited = [] {
  const auto limit = parse_simd(variable("LOCKSTEP_SIMD"));
  if (limit) kernels::limit_isa(*limit);
  return limit.has_value();
}();

}  // namespace

Env Env::read() {
  Env env;
  env.segment = variable("LOCKSTEP_SEGMENT");
  env.simd = variable("LOCKSTEP_SIMD");
  env.mpi = variable("LOCKSTEP_MPI");
  env.ucx = variable("LOCKSTEP_UCX");
  env.tune = variable("LOCKSTEP_TUNE");
  shared::parse_tuning(env.tune);  // rejects invalid values
  env.network = variable("LOCKSTEP_NETWORK");
  env.record_dir = folder("LOCKSTEP_RECORD_DIR");
  env.trace_dir = folder("LOCKSTEP_TRACE");
  const auto simd = parse_simd(env.simd);
  if (!simd) {
    internal::reject(
        fmt::format("LOCKSTEP_SIMD is '{}'; it takes scalar, avx2 or avx512", *env.simd));
  }
  kernels::limit_isa(*simd);
  if (const auto text = variable("LOCKSTEP_CHECK")) env.check = parse_check(*text);
  if (variable("LOCKSTEP_RESTART")) {
    env.restart =
        internal::number("lockstep run", {"LOCKSTEP_RESTART"}, 0, internal::kMaxWorldSize).value;
  }
  if (const auto text = variable("LOCKSTEP_TIMEOUT")) {
    constexpr double kLongest = 3e9;  // a century
    const double seconds = base::parse_number<double>(*text).value_or(0);
    if (!std::isfinite(seconds) || seconds <= 0 || seconds > kLongest) {
      internal::reject(
          fmt::format("LOCKSTEP_TIMEOUT is '{}'; it takes the seconds one operation may last, "
                      "as 30 or 0.5",
                      *text));
    }
    env.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
  }
  return env;
}

}  // namespace lockstep
