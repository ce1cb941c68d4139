#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace lockstep::test {

/// How the ranks of a test come to be.
/// `hosts`, `gloo_hosts`: over the hierarchical engine, told to be on the hosts of hosts_of, as
/// threads with the shared engine for a network, and as processes with Gloo between hosts.
/// `launched`: this process is a rank already, of mpirun for one; LOCKSTEP_TEST_BACKEND says over
/// which engine it joins, and with LOCKSTEP_TEST_HOSTS set that engine is between the hosts of
/// hosts_of.
enum class Form { solo, threads, processes, hosts, gloo, gloo_hosts, launched };

struct Setting {
  Form form;
  int n_ranks;
};

std::string name_of(const Setting& setting);
std::ostream& operator<<(std::ostream& out, const Setting& setting);

/// For each of n ranks, the lowest rank on its host: hosts of two ranks and of three, and for four
/// ranks two hosts that take turns.
std::vector<int> hosts_of(int n_ranks);
/// hosts_of the ranks that run now; empty where they are not on several hosts.
const std::vector<int>& hosts();

/// Runs body as every rank, each with its default group, and waits for all. A failed expectation
/// or an exception on any rank fails the test. Processes (gloo: over that engine) are forked from
/// this one, join by init_dist as under `lockstep run`, and are killed when they outlast
/// `watchdog`.
void run_as(const Setting& setting, const std::function<void()>& body,
            std::chrono::seconds watchdog = std::chrono::seconds(120));

/// Forks n ranks that may die as they like: returns each one's status as waitpid gives it.
/// `started`: called in the parent with the pids, before any is waited for. `backend`: for
/// init_dist; the ranks have a MASTER_ADDR and MASTER_PORT of this host.
std::vector<int> run_processes(int n, const std::function<void()>& body,
                               std::chrono::seconds watchdog = std::chrono::seconds(120),
                               const std::function<void(std::span<const pid_t>)>& started = {},
                               const std::string& backend = "auto");
/// A port of this host that was free a moment ago.
int free_port();

}  // namespace lockstep::test
