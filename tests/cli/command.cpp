#include "cli/command.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "support/waiting.hpp"

namespace lockstep::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::string next_mark() {
  static int count = 0;
  return fmt::format("LOCKSTEP_TEST_MARK={}-{}", getpid(), ++count);
}

struct Ends {
  base::UniqueFd read;
  base::UniqueFd write;
};

Ends make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

Ends make_terminal() {
  Ends ends;
  ends.read.reset(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!ends.read || grantpt(ends.read.get()) != 0 || unlockpt(ends.read.get()) != 0) {
    throw std::runtime_error("posix_openpt");
  }
  ends.write.reset(open(ptsname(ends.read.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  winsize size{};
  size.ws_row = 24;
  size.ws_col = 80;
  ioctl(ends.write.get(), TIOCSWINSZ, &size);
  return ends;
}

base::UniqueFd input_file(const std::optional<std::string>& input) {
  if (!input) return base::UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  base::UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (write(file.get(), input->data(), input->size()) != static_cast<ssize_t>(input->size())) {
    throw std::runtime_error("write");
  }
  lseek(file.get(), 0, SEEK_SET);
  return file;
}

std::vector<std::string> environment(const StartOptions& start, const std::string& mark) {
  std::vector<std::string> result{mark};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable(*entry);
    const std::string name(variable.substr(0, variable.find('=')));
    // GTEST_*: the shard of this process is not that of a test binary that it starts.
    const std::set<std::string> unwanted = {"OMP_NUM_THREADS",    "MASTER_PORT",
                                            "NO_COLOR",           "TERM",
                                            "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"};
    if (unwanted.count(name) == 0 && start.variables.count(name) == 0) {
      result.emplace_back(variable);
    }
  }
  for (const auto& [name, value] : start.variables) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

bool has_mark(const fs::path& process, const std::string& mark) {
  std::ifstream file(process / "environ", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return text.find(mark + '\0') != std::string::npos;  // a zombie has no environment
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

/// Of this process and of all that it starts. Returns false with errno.
bool remove_call(int number) {
  std::array<sock_filter, 4> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

bool can_miss_calls() {
  const pid_t child = fork();
  if (child == 0) _exit(remove_call(/*number=*/-1) ? 0 : 1);
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

Command::Command(const StartOptions& start) : mark_(next_mark()), watchdog_(start.watchdog) {
  const base::UniqueFd input = input_file(start.input);
  const bool has_terminal = start.terminal || start.session;
  Ends out = has_terminal ? make_terminal() : make_pipe();
  Ends err;
  if (!has_terminal) err = make_pipe();

  std::vector<std::string> arguments;
  if (!start.shell.empty()) arguments = {"/bin/sh", "-c", start.shell, "sh"};
  arguments.push_back(start.program.empty() ? LOCKSTEP_COMMAND : start.program);
  arguments.insert(arguments.end(), start.arguments.begin(), start.arguments.end());
  std::vector<std::string> variables = environment(start, mark_);
  const std::vector<char*> argument_pointers = pointers(arguments);
  const std::vector<char*> variable_pointers = pointers(variables);

  pid_ = fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "cannot fork");
  if (pid_ == 0) {
    dup2(start.session ? out.write.get() : input.get(), STDIN_FILENO);
    if (start.session && (setsid() < 0 || ioctl(STDIN_FILENO, TIOCSCTTY, 0) != 0)) _exit(97);
    dup2(out.write.get(), STDOUT_FILENO);
    dup2(has_terminal ? out.write.get() : err.write.get(), STDERR_FILENO);
    if (start.missing_call >= 0 && !remove_call(start.missing_call)) _exit(98);
    execve(argument_pointers[0], argument_pointers.data(), variable_pointers.data());
    _exit(99);
  }
  out_ = std::move(out.read);
  err_ = std::move(err.read);
}

Command::~Command() {
  if (!reaped_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const pid_t left : processes()) kill(left, SIGKILL);
}

void Command::send(int signal) const { kill(pid_, signal); }

void Command::type(const std::string& keys) const {
  if (write(out_.get(), keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) {
    throw std::runtime_error("write to a terminal");
  }
}

bool Command::read_some(int timeout_ms) {
  std::array<pollfd, 2> entries{{{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}}};
  if (!out_ && !err_) return false;
  poll(entries.data(), entries.size(), timeout_ms);
  std::array<char, 65536> buffer;
  for (auto* const end : {&out_, &err_}) {
    if (entries[end == &out_ ? 0 : 1].revents == 0) continue;
    const ssize_t n_bytes = read(end->get(), buffer.data(), buffer.size());
    if (n_bytes <= 0) {
      end->reset();
    } else {
      (end == &out_ ? ended_.out : ended_.err)
          .append(buffer.data(), static_cast<std::size_t>(n_bytes));
    }
  }
  return true;
}

void Command::read_until(const std::string& text, int times) {
  read_until([&] { return count_of(ended_.out, text) + count_of(ended_.err, text) >= times; },
             text);
}

void Command::read_until(const std::function<bool()>& is_there, const std::string& what) {
  const auto limit = Clock::now() + watchdog_;
  while (!is_there()) {
    if (!read_some(/*timeout_ms=*/100)) {
      FAIL() << "ended before it wrote '" << what << "': " << ended_.out << ended_.err;
    }
    if (Clock::now() > limit) {
      kill(pid_, SIGKILL);
      FAIL() << "watchdog: never wrote '" << what << "': " << ended_.out << ended_.err;
    }
  }
}

void Command::read_available() {
  std::size_t before = 0;
  do {
    before = ended_.out.size() + ended_.err.size();
  } while (read_some(/*timeout_ms=*/0) && ended_.out.size() + ended_.err.size() > before);
}

void Command::wait_unread() {
  int status = 0;
  if (!wait_until([&] { return waitpid(pid_, &status, WNOHANG) != 0; }, watchdog_)) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
    ADD_FAILURE() << "watchdog: the command does not end";
  }
  reaped_ = true;
  ended_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  ended_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

Ended Command::wait() {
  const auto limit = Clock::now() + watchdog_;
  while (read_some(/*timeout_ms=*/100)) {
    if (Clock::now() > limit) {
      kill(pid_, SIGKILL);
      ADD_FAILURE() << "watchdog: the outputs do not end: " << ended_.out.substr(0, 2000)
                    << ended_.err.substr(0, 2000);
      break;
    }
  }
  if (!reaped_) wait_unread();
  return ended_;
}

std::vector<pid_t> Command::processes() const {
  std::vector<pid_t> result;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (has_mark(entry.path(), mark_)) result.push_back(std::stoi(name));
  }
  return result;
}

void Command::wait_for_processes(std::size_t count) const {
  if (!wait_until([&] { return processes().size() == count; }, watchdog_)) {
    FAIL() << "watchdog: " << processes().size() << " processes";
  }
}

void Command::expect_nothing_left() const {
  std::vector<pid_t> left;
  const auto are_all_gone = [&] { return (left = processes()).empty(); };
  wait_until(are_all_gone, watchdog_);
  for (const pid_t pid : left) {
    std::ifstream file(fmt::format("/proc/{}/cmdline", pid));
    std::string line;
    std::getline(file, line);
    std::replace(line.begin(), line.end(), '\0', ' ');
    ADD_FAILURE() << "left running: " << pid << " " << line;
  }
  if (fs::exists("/dev/shm")) {
    for (const fs::directory_entry& entry : fs::directory_iterator("/dev/shm")) {
      const std::string name = entry.path().filename();
      EXPECT_TRUE(!contains(name, "lockstep") || name.starts_with("lockstep-test-")) << name;
    }
  }
  // Jobs of other tests may be in their bootstrap; a leftover socket would stay.
  const auto is_no_socket_left = [] {
    return !contains(contents_of("/proc/net/unix"), "@lockstep-");
  };
  EXPECT_TRUE(wait_until(is_no_socket_left, watchdog_));
}

Ended run(const StartOptions& start) {
  StartOptions whole = start;
  whole.arguments.insert(whole.arguments.begin(), "run");
  Command command(whole);
  Ended ended = command.wait();
  command.expect_nothing_left();
  return ended;
}

Ended run(const std::vector<std::string>& arguments) {
  return run(StartOptions{.arguments = arguments});
}

std::vector<std::string> script(const std::vector<std::string>& options, const std::string& text) {
  std::vector<std::string> arguments = options;
  arguments.insert(arguments.end(), {"/bin/sh", "-c", text});
  return arguments;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

std::vector<std::string> sorted_lines_of(const std::string& text) {
  std::vector<std::string> lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace lockstep::test
