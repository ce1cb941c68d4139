#include "faults/campaign_loads.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include "base/fd.hpp"
#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
constexpr std::chrono::seconds kPatience{60};

/// "socket:[INODE]" for each open socket.
std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> sockets;
  std::error_code error;
  for (fs::directory_iterator i(fmt::format("/proc/{}/fd", pid), error), end; !error && i != end;
       i.increment(error)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(i->path(), gone).string();
    if (target.starts_with("socket:")) sockets.insert(target);
  }
  return sockets;
}

/// TCP ports that a process listens at.
std::set<int> ports_of(pid_t pid) {
  const std::set<std::string> sockets = sockets_of(pid);
  std::set<int> ports;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream file(fmt::format("/proc/{}/net/{}", pid, table));
    std::string line;
    std::getline(file, line);  // the heading
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string number, local, remote, state, queues, timer, retries, user, timeout, inode;
      words >> number >> local >> remote >> state >> queues >> timer >> retries >> user >>
          timeout >> inode;
      constexpr const char* kListens = "0A";
      if (state == kListens && sockets.contains(fmt::format("socket:[{}]", inode))) {
        ports.insert(std::stoi(local.substr(local.rfind(':') + 1), nullptr, 16));
      }
    }
  }
  return ports;
}

/// A connection of this host, open; none if nothing accepts it within a second.
base::UniqueFd connect_to(int port) {
  base::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  pollfd entry{.fd = fd.get(), .events = POLLOUT, .revents = 0};
  return ::poll(&entry, 1, 1000) == 1 ? std::move(fd) : base::UniqueFd();
}

/// Noise, zeros, another protocol, half a word; of each kind one that hangs up and one that stays.
std::vector<base::UniqueFd> send_garbage(const Command& command) {
  std::mt19937 random(11);
  std::string noise(4096, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  std::vector<base::UniqueFd> open;
  for (const pid_t pid : command.processes()) {
    for (const int port : ports_of(pid)) {
      for (const std::string& bytes :
           {noise, std::string(64, '\0'), std::string("GET / HTTP/1.0\r\n\r\n"), std::string("x"),
            std::string()}) {
        for (const bool stays : {false, true}) {
          base::UniqueFd fd = connect_to(port);
          if (!fd) continue;
          ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
          if (stays) open.push_back(std::move(fd));
        }
      }
    }
  }
  return open;
}

}  // namespace

void do_to_job(const std::string& load, const Command& command, const std::string& folder,
               int n_ranks, const std::vector<std::string>& reports) {
  const bool stops = load == "stopped-launcher";
  if (!stops && load != "garbage") return;
  const auto are_there = [&folder](const std::vector<std::string>& names) {
    return [&folder, &names] {
      for (const std::string& name : names) {
        if (!fs::exists(folder + "/" + name)) return false;
      }
      return true;
    };
  };
  std::vector<std::string> joined;
  for (int rank = 0; rank < n_ranks; ++rank) joined.push_back(fmt::format("joined{}", rank));
  EXPECT_TRUE(wait_until(are_there(joined), kPatience)) << "not all have joined";
  std::vector<base::UniqueFd> open;
  if (stops) {
    command.send(SIGSTOP);
    EXPECT_TRUE(wait_until([&] { return thread_state(command.pid()) == 'T'; }, kPatience));
  } else {
    open = send_garbage(command);
    EXPECT_FALSE(open.empty()) << "no listener";
  }
  std::ofstream(folder + "/go~") << "go";
  fs::rename(folder + "/go~", folder + "/go");
  wait_until(are_there(reports), kPatience);  // the campaign looks which are missing
  if (stops) command.send(SIGCONT);
}

std::string training_rank(const Trial& trial, const std::string& folder) {
  return fmt::format(
      "trap '' TERM; {4} "
      "exec {0} --backend {1} --data {2} --batch 12 --epochs 1000 --threads 1 --metrics-every 1 "
      "--metrics {3}/metrics 2>{3}/error-$RANK",
      trial.engine.program, trial.engine.backend, LOCKSTEP_DIGITS, folder,
      write_pid(folder + "/pid-$RANK"));
}

void fail_training(const Trial& trial, const Command& command, const std::string& folder) {
  const auto has_come = [&] {
    const std::string lines = contents_of(folder + "/metrics");
    return std::ranges::count(lines, '\n') >= trial.n_training_steps();
  };
  const auto has_ended = [&] { return thread_state(command.pid()) == 'Z'; };
  EXPECT_TRUE(wait_until([&] { return has_come() || has_ended(); }));
  if (!has_come()) return;
  std::ofstream(folder + "/fault") << std::chrono::steady_clock::now().time_since_epoch().count();
  const int pid = std::stoi(contents_of(fmt::format("{}/pid-{}", folder, trial.victim)));
  EXPECT_EQ(::kill(pid, trial.fault == "kill" ? SIGKILL : SIGSTOP), 0);
}

}  // namespace lockstep::test
