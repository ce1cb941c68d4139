#include "run/child_process.hpp"

#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "base/cpus.hpp"
#include "run/errors.hpp"
#include "world/variables.hpp"

namespace lockstep::run {
namespace {

constexpr int kNotFound = 127;
constexpr int kCannotRun = 126;

/// 0, or the errno value that says why the file cannot be run.
int runnable(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  return access(path.c_str(), X_OK) == 0 ? 0 : errno;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

/// Data for the child between fork and exec, prepared before the fork: only async-signal-safe calls
/// are allowed there.
struct Child {
  const ProcessSpec& spec;
  const Guard& guard;
  const Signals& signals;
  std::vector<char*> arguments;
  std::vector<char*> environment;
  const cpu_set_t* cpus;
  std::size_t n_cpus_bytes;
  pid_t launcher;
  int error_fd;
};

/// Returns false with errno if a step fails.
bool prepare(const Child& child) {
  const ProcessSpec& spec = child.spec;
  if (setpgid(0, 0) != 0) return false;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return false;
  if (getppid() != child.launcher) _exit(1);  // the launcher died before the line above
  child.guard.add_own_group();
  if (child.cpus != nullptr && sched_setaffinity(0, child.n_cpus_bytes, child.cpus) != 0) {
    return false;
  }
  if (dup2(spec.stdin_fd, STDIN_FILENO) < 0 || dup2(spec.stdout_fd, STDOUT_FILENO) < 0 ||
      dup2(spec.stderr_fd, STDERR_FILENO) < 0) {
    return false;
  }
  for (const int fd : spec.inherited_fds) {
    if (fcntl(fd, F_SETFD, 0) != 0) return false;
  }
  if (setrlimit(RLIMIT_NOFILE, &spec.open_files) != 0) return false;
  child.signals.restore();
  return true;
}

[[noreturn]] void exec_child(const Child& child) {
  if (prepare(child)) {
    execve(child.spec.program.c_str(), child.arguments.data(), child.environment.data());
  }
  const int error_number = errno;
  [[maybe_unused]] const ssize_t n_bytes =
      write(child.error_fd, &error_number, sizeof error_number);
  _exit(kCannotRun);
}

/// What starts a program that cannot be started by itself, in parentheses; empty: unknown.
std::string how_to_start(const std::string& program) {
  if (!program.ends_with(".py")) return {};
  return fmt::format(" (a Python program: lockstep run -n N python {})", program);
}

std::string exec_failure(const std::string& program, int error_number) {
  std::string text = fmt::format("cannot run '{}'", program);
  if (error_number == ENOEXEC && !how_to_start(program).empty()) {
    text += how_to_start(program);
  } else if (error_number == ENOEXEC) {
    text += " (neither a program for this machine nor a script that begins with '#!')";
  } else if (error_number == ENOENT) {
    text += " (it exists, but its interpreter or loader does not)";
  }
  return text;
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    const int error_number = runnable(name);
    if (error_number == 0) return name;
    throw ExecError(
        error_number == ENOENT ? kNotFound : kCannotRun, error_number,
        fmt::format("cannot run '{}'{}", name, error_number == ENOENT ? "" : how_to_start(name)));
  }
  const std::string path = internal::variable("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  std::string_view rest = path;
  int error_number = ENOENT;
  while (!name.empty()) {
    const std::size_t colon = rest.find(':');
    const std::string_view folder = rest.substr(0, colon);
    std::string candidate = fmt::format("{}/{}", folder.empty() ? "." : folder, name);
    const int why_not = runnable(candidate);
    if (why_not == 0) return candidate;
    if (why_not == EACCES) error_number = EACCES;
    if (colon == std::string_view::npos) break;
    rest.remove_prefix(colon + 1);
  }
  throw ExecError(error_number == ENOENT ? kNotFound : kCannotRun, error_number,
                  fmt::format("cannot find program '{}' in PATH{}", name,
                              name.ends_with(".py")
                                  ? how_to_start(name)
                                  : fmt::format(" (for one in this folder, use ./{})", name)));
}

bool links_lockstep(const std::string& path) {
  struct stat program {};
  struct stat self {};
  const base::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd || fstat(fd.get(), &program) != 0 || !S_ISREG(program.st_mode) ||
      program.st_size < SELFMAG || stat("/proc/self/exe", &self) != 0 ||
      (program.st_dev == self.st_dev && program.st_ino == self.st_ino)) {
    return false;
  }
  const auto n_bytes = static_cast<std::size_t>(program.st_size);
  void* const bytes = mmap(nullptr, n_bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (bytes == MAP_FAILED) return false;
  // init_dist reads this variable, so its name is in every program that can call init_dist.
  constexpr std::string_view kVariable = "LOCKSTEP_SEGMENT";
  const bool found = std::memcmp(bytes, ELFMAG, SELFMAG) == 0 &&
                     memmem(bytes, n_bytes, kVariable.data(), kVariable.size()) != nullptr;
  munmap(bytes, n_bytes);
  return found;
}

ProcessStarter::ProcessStarter(const Guard& guard, const Signals& signals)
    : guard_(guard), signals_(signals) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw system_error("cannot make a pipe");
  read_end_.reset(ends[0]);
  write_end_.reset(ends[1]);
}

ChildGroup ProcessStarter::start(const ProcessSpec& spec) {
  base::CpuMask cpus{};  // a cpu_set_t is too short for large machines
  if (spec.cpu) {
    const auto cpu = static_cast<std::size_t>(*spec.cpu);
    cpus.at(cpu / 64) |= std::uint64_t{1} << (cpu % 64);
  }
  const Child child{spec,
                    guard_,
                    signals_,
                    pointers(spec.arguments),
                    pointers(spec.environment),
                    spec.cpu ? reinterpret_cast<const cpu_set_t*>(cpus.data()) : nullptr,
                    sizeof cpus,
                    getpid(),
                    write_end_.get()};
  program_ = spec.program;
  const pid_t pid = fork();
  if (pid < 0) throw system_error("cannot start a process");
  if (pid == 0) exec_child(child);
  setpgid(pid, pid);  // as the child does, so that a kill of the group reaches it from now on
  return ChildGroup(pid);
}

void ProcessStarter::wait() {
  write_end_.reset();  // exec closes the children's copies: then the read below returns nothing
  int error_number = 0;
  ssize_t n_bytes = 0;
  do n_bytes = read(read_end_.get(), &error_number, sizeof error_number);
  while (n_bytes < 0 && errno == EINTR);
  if (n_bytes != sizeof error_number) return;
  throw ExecError(kCannotRun, error_number, exec_failure(program_, error_number));
}

}  // namespace lockstep::run
