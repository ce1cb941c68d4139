#include "nn/gloo_engine/c10d_rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <cerrno>
#include <exception>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/process.hpp"
#include "engines/hierarchical/hosts.hpp"

namespace lockstep::nn::detail {
namespace {

using JoinClock = lockstep::detail::JobClock;
using std::chrono::milliseconds;

/// How often a rank that waits checks which others have ended.
constexpr milliseconds kCheckInterval{300};
/// How long rank 0 stays for others after a failed rendezvous.
constexpr milliseconds kReadTime{1000};

const std::string kCount = "count", kConclusions = "conclusions", kResult = "result",
                  kRead = "read";
/// A result is empty if all ranks have joined, or one of these and the ranks.
constexpr char kLateSign = 'T', kLostSign = 'L';

std::string key_of(int rank) { return fmt::format("joined/{}", rank); }
std::vector<std::uint8_t> to_bytes(std::string_view text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string names_of(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

/// What a rank publishes at the store.
struct Introduction {
  std::string nonce;
  Membership::Process process;
  std::string host;
};

/// The same on two ranks only if they can share memory and see each other's end: of one boot of
/// one system, one user, one network namespace (in which they join) and one PID namespace.
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

Introduction introduction_of(const std::string& text) {
  Introduction introduction;
  std::istringstream in(text);
  in >> introduction.nonce >> introduction.process.pid >> introduction.process.start_time;
  std::getline(in, introduction.host);
  return introduction;
}

/// After a restart by the launcher, or when a store outlives several groups of one name, the keys
/// of the first are still there: the n-th rendezvous of each rank is one.
StorePtr own_part(const StorePtr& store, const std::string& keys, int rank) {
  const auto attempt = store->add(fmt::format("{}/attempt/{}", keys, rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}/{}", keys, attempt), store);
}

}  // namespace

std::string own_introduction(const ErrorContext& context) {
  return fmt::format("{:016x} {} {} {}", hierarchical::draw_nonce(), ::getpid(),
                     base::process_start_time(::getpid()), host_id(context));
}

bool Membership::has_ended(int of_rank) const {
  const auto r = static_cast<std::size_t>(of_rank);
  if (hosts[r] != hosts[static_cast<std::size_t>(rank)]) return false;
  return base::process_state(processes[r].pid, processes[r].start_time) == base::ProcessState::gone;
}

Rendezvous::Rendezvous(const StorePtr& store, Options options)
    : options_(std::move(options)), store_(own_part(store, options_.keys, options_.context.rank)) {}

void Rendezvous::join(JoinClock::time_point deadline) {
  const std::string introduction = own_introduction(options_.context);
  bool has_result = false;
  try {
    store_->set(key_of(options_.context.rank), to_bytes(introduction));
    if (store_->add(kCount, 1) == options_.size) conclude("");
    next_check_ = JoinClock::now() + kCheckInterval;
    poll_until(deadline + kPatience, [&] {
      has_result = store_->check({kResult});
      if (!has_result) conclude_if_late_or_lost(deadline);
      return has_result;
    });
    if (!has_result) {
      throw TimeoutError(options_.context, fmt::format("of {} ranks, one stopped while it joined: "
                                                       "no result within {} ms",
                                                       options_.size, options_.timeout.count()));
    }
    const std::string result = text_of(store_->get(kResult));
    if (result.empty()) return;
    store_->add(kRead, 1);
    if (options_.context.rank == 0) stay_for_others();
    fail(result.front(), result.substr(1));
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    // The store is often in rank 0.
    if (const auto lost = ended(); !lost.empty()) fail(kLostSign, names_of(lost));
    throw;
  }
}

Membership membership_of(int rank, const std::vector<std::string>& introductions) {
  std::vector<Introduction> all;
  for (const std::string& text : introductions) all.push_back(introduction_of(text));
  Membership membership{
      .rank = rank, .job = "torch-" + all.front().nonce, .hosts = {}, .processes = {}};
  for (const Introduction& each : all) {
    const auto lowest = std::ranges::find(all, each.host, &Introduction::host);
    membership.hosts.push_back(static_cast<int>(lowest - all.begin()));
    membership.processes.push_back(each.process);
  }
  return membership;
}

Membership Rendezvous::membership() const {
  std::vector<std::string> introductions;
  for (int r = 0; r < options_.size; ++r) {
    introductions.push_back(text_of(store_->get(key_of(r))));
  }
  return membership_of(options_.context.rank, introductions);
}

std::vector<int> Rendezvous::ended() const {
  std::vector<int> ranks;
  for (int r = 0; options_.earlier != nullptr && r < options_.size; ++r) {
    if (options_.earlier->has_ended(options_.earlier_ranks[static_cast<std::size_t>(r)])) {
      ranks.push_back(r);
    }
  }
  return ranks;
}

/// The first conclusion is everybody's.
void Rendezvous::conclude(std::string_view result) {
  if (store_->add(kConclusions, 1) == 1) store_->set(kResult, to_bytes(result));
}

void Rendezvous::conclude_if_late_or_lost(JoinClock::time_point deadline) {
  const auto has_joined = [this](int rank) { return store_->check({key_of(rank)}); };
  const auto now = JoinClock::now();
  if (now > deadline) {
    std::vector<int> missing;
    for (int r = 0; r < options_.size; ++r) {
      if (!has_joined(r)) missing.push_back(r);
    }
    if (!missing.empty()) conclude(kLateSign + names_of(missing));
  } else if (now > next_check_) {
    std::vector<int> lost = ended();
    std::erase_if(lost, has_joined);
    if (!lost.empty()) conclude(kLostSign + names_of(lost));
    next_check_ = JoinClock::now() + kCheckInterval;
  }
}

void Rendezvous::stay_for_others() {
  poll_until(JoinClock::now() + kReadTime,
             [this] { return store_->add(kRead, 0) >= store_->add(kCount, 0); });
}

void Rendezvous::fail(char kind, const std::string& ranks) const {
  if (kind == kLostSign) {
    throw PeerLost(options_.context, fmt::format("of {} ranks, {} ended and did not {}",
                                                 options_.size, ranks, options_.action));
  }
  throw TimeoutError(options_.context,
                     fmt::format("of {} ranks, {} did not {} within {} ms", options_.size, ranks,
                                 options_.action, options_.timeout.count()));
}

}  // namespace lockstep::nn::detail
