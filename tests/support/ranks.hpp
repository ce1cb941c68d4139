#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace lockstep::test {

/// How the ranks of a test are created.
/// `hosts`, `gloo_hosts`: over the hierarchical engine, with the hosts of hosts_of; as threads with
/// the shared engine as network, and as processes with Gloo between hosts.
/// `messages`: threads over a MessageNetwork.
/// `launched`: this process is already a rank, for example of mpirun; LOCKSTEP_TEST_BACKEND selects
/// the engine, and if LOCKSTEP_TEST_HOSTS is set that engine connects the hosts of
/// hosts_of.
enum class Form { solo, threads, processes, hosts, messages, gloo, gloo_hosts, launched };

struct Setting {
  Form form;
  int n_ranks;
};

/// In a test, before run_as: skips it where it has nothing to check with fewer ranks than n.
/// Of `launched` the number is known to the ranks only.
#define SKIP_UNLESS_RANKS(n, setting)                                                \
  if ((setting).form != ::lockstep::test::Form::launched && (setting).n_ranks < (n)) \
  GTEST_SKIP() << "of " << (n) << " ranks or more"

std::string name_of(const Setting& setting);
std::ostream& operator<<(std::ostream& out, const Setting& setting);

/// For each of n ranks, the lowest rank on its host: hosts of two ranks and of three; for four
/// ranks two hosts with alternating ranks.
std::vector<int> hosts_of(int n_ranks);
/// hosts_of the current ranks; empty if they are not on several hosts.
const std::vector<int>& hosts();

/// At a load of 40 on two cores 10,000 collectives of 4 processes took more than two minutes.
inline constexpr std::chrono::seconds kWatchdog = std::chrono::minutes(10);

/// Runs body as every rank, each with its default group, and waits for all. A failed expectation
/// or an exception on any rank fails the test. Processes (gloo: over that engine) are forked from
/// this one, join by init_dist as under `lockstep run`, and are killed if they run longer than
/// `watchdog`.
void run_as(const Setting& setting, const std::function<void()>& body,
            std::chrono::seconds watchdog = kWatchdog);

/// Forks n ranks that may exit in any way; returns each one's status as from waitpid.
/// `started`: called in the parent with the pids, before it waits for any. `backend`: for
/// init_dist; the ranks have a MASTER_ADDR and MASTER_PORT of this host.
std::vector<int> run_processes(int n, const std::function<void()>& body,
                               std::chrono::seconds watchdog = kWatchdog,
                               const std::function<void(std::span<const pid_t>)>& started = {},
                               const std::string& backend = "auto");
/// Runs body in a fork of this process, which must not itself join or leave a world. The fork ends
/// with 0, with 4 if an expectation failed or body threw; if it hangs, with SIGALRM.
pid_t start_fork(const std::function<void()>& body);
/// The same, and returns its exit status, or 128 and the number of the signal.
int in_a_fork(const std::function<void()>& body);

}  // namespace lockstep::test
