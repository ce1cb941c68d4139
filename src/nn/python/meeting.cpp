#include "nn/python/meeting.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <lockstep/error.hpp>
#include <sstream>

#include "base/process.hpp"
#include "engines/hierarchical/hosts.hpp"
#include "nn/python/poll.hpp"

namespace lockstep::python {
namespace {

using Clock = std::chrono::steady_clock;

/// How often a rank that waits looks which others have ended.
constexpr std::chrono::milliseconds kLookInterval{300};

/// What a rank tells the others.
struct Introduction {
  std::string nonce;
  Meeting::Process process;
  /// The same on two ranks only if they can share memory and see each other's end: of one boot of
  /// one system, one user, one network namespace (in which they meet) and one PID namespace.
  std::string host;
};

std::string host_id(const ErrorContext& context) {
  std::string id;
  errno = 0;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  // Else each rank would take the others for those of other hosts.
  if (id.empty() && (errno == EMFILE || errno == ENFILE)) {
    throw SystemError(context, errno, "cannot read which host this is");
  }
  if (id.empty()) id = fmt::format("{:016x}", hierarchical::draw_nonce());
  for (const char* const name : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
    struct stat status {};
    if (::stat(name, &status) == 0) id += fmt::format(" {}", status.st_ino);
  }
  return fmt::format("{} {}", id, ::geteuid());
}

std::string own_introduction(const ErrorContext& context) {
  return fmt::format("{:016x} {} {} {}", hierarchical::draw_nonce(), ::getpid(),
                     base::process_start_time(::getpid()), host_id(context));
}

Introduction introduction_of(const std::string& text) {
  Introduction introduction;
  std::istringstream in(text);
  in >> introduction.nonce >> introduction.process.pid >> introduction.process.start_time;
  std::getline(in, introduction.host);
  return introduction;
}

/// Every rank's `value`, in rank order.
std::vector<std::string> exchange(c10d::Store& store, const Membership& membership,
                                  const Earlier& earlier, const std::string& value,
                                  const ErrorContext& context) {
  // A store may outlive several process groups of one name: the n-th of each rank meet.
  const auto key = [&](int rank, std::int64_t n) { return fmt::format("lockstep/{}/{}", n, rank); };
  std::vector<int> missing;
  std::vector<std::string> keys;
  const auto throw_if_gone = [&] {
    std::vector<int> gone;
    std::ranges::copy_if(missing, std::back_inserter(gone),
                         [&](int rank) { return earlier.is_gone(rank); });
    if (gone.empty()) return;
    throw PeerLost(context, fmt::format("rank{} {} ended and did not come to init_process_group or "
                                        "new_group",
                                        gone.size() == 1 ? "" : "s", fmt::join(gone, ", ")));
  };
  for (int rank = 0; rank < membership.size; ++rank) missing.push_back(rank);
  try {
    const std::int64_t n = store.add(fmt::format("lockstep/{}", membership.rank), 1);
    store.set(key(membership.rank, n), value);
    for (const int rank : missing) keys.push_back(key(rank, n));
    auto next_look = Clock::now() + kLookInterval;
    bool have_come = false;
    poll_until(Clock::now() + membership.timeout, [&] {
      have_come = store.check(keys);
      if (have_come || Clock::now() < next_look) return have_come;
      std::erase_if(missing, [&](int rank) { return store.check({key(rank, n)}); });
      throw_if_gone();
      next_look = Clock::now() + kLookInterval;
      return false;
    });
    if (!have_come) {
      std::erase_if(missing, [&](int rank) { return store.check({key(rank, n)}); });
      throw TimeoutError(context,
                         fmt::format("rank{} {} did not come to init_process_group or new_group "
                                     "within the timeout of {} ms",
                                     missing.size() == 1 ? "" : "s", fmt::join(missing, ", "),
                                     membership.timeout.count()));
    }
    std::vector<std::string> values;
    for (const std::string& each : keys) values.push_back(store.get_to_str(each));
    return values;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_if_gone();  // the store is often in rank 0
    throw EngineError(context, fmt::format("the store failed: {}", error.what()));
  }
}

}  // namespace

bool Meeting::is_gone(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  if (hosts[r] != hosts[static_cast<std::size_t>(membership.rank)]) return false;
  return base::process_state(processes[r].pid, processes[r].start_time) == base::ProcessState::gone;
}

Meeting meet(c10d::Store& store, const Membership& membership, const Earlier& earlier,
             std::source_location where) {
  const ErrorContext context{.operation = "init_process_group",
                             .group = membership.name,
                             .rank = membership.rank,
                             .where = where};
  Meeting meeting{.membership = membership, .job = {}, .hosts = {0}, .processes = {{}}};
  if (membership.size == 1) return meeting;
  std::vector<Introduction> all;
  for (const std::string& text :
       exchange(store, membership, earlier, own_introduction(context), context)) {
    all.push_back(introduction_of(text));
  }
  meeting.job = "torch-" + all.front().nonce;
  meeting.hosts.clear();
  meeting.processes.clear();
  for (const Introduction& each : all) {
    const auto lowest = std::find_if(
        all.begin(), all.end(), [&](const Introduction& other) { return other.host == each.host; });
    meeting.hosts.push_back(static_cast<int>(lowest - all.begin()));
    meeting.processes.push_back(each.process);
  }
  return meeting;
}

}  // namespace lockstep::python
