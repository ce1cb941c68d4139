#include "run/describe.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>

namespace lockstep::run {

std::string name_of_signal(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

int exit_code_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string how_ended(int wait_status) {
  if (!WIFSIGNALED(wait_status)) {
    return fmt::format("exited with code {}", WEXITSTATUS(wait_status));
  }
  const int signal = WTERMSIG(wait_status);
  return fmt::format("was killed by {} (signal {}, {}{})", name_of_signal(signal), signal,
                     strsignal(signal), WCOREDUMP(wait_status) ? ", core dumped" : "");
}

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string list_of(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  constexpr std::size_t kShown = 8;
  if (ranks.size() > kShown) {
    return fmt::format("ranks {} and {} more",
                       fmt::join(ranks.begin(), ranks.begin() + kShown, ", "),
                       ranks.size() - kShown);
  }
  return fmt::format("ranks {} and {}", fmt::join(ranks.begin(), ranks.end() - 1, ", "),
                     ranks.back());
}

}  // namespace lockstep::run
