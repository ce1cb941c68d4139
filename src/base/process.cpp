#include "base/process.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/fd.hpp"

namespace lockstep::base {
namespace {

struct Stat {
  char state = 'X';
  std::uint64_t n_cpu_ticks = 0;
  std::uint64_t n_threads = 0;
  std::uint64_t start_time = 0;
  std::uint64_t n_resident_pages = 0;
};

/// /proc may belong to another PID namespace, in which the same pids are other processes.
bool is_proc_of_this_namespace() noexcept {
  char text[16] = {};
  return ::readlink("/proc/self", text, sizeof text - 1) > 0 && std::atoi(text) == ::getpid();
}

/// Reads a file into `text`, null-terminated; false if it cannot be read.
template <std::size_t n>
bool read_text(const char* path, char (&text)[n]) noexcept {
  const UniqueFd file(::open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t n_read = file ? ::read(file.get(), text, n - 1) : -1;
  text[n_read > 0 ? n_read : 0] = '\0';
  return n_read > 0;
}

/// Empty if it cannot be read.
template <std::size_t n>
std::string_view read_link(const char* path, char (&text)[n]) noexcept {
  const ssize_t n_read = ::readlink(path, text, n);
  return {text, n_read > 0 ? static_cast<std::size_t>(n_read) : 0};
}

/// The offset that this process's time namespace adds to start times, in clock ticks; nullopt: not
/// available from /proc.
std::optional<std::int64_t> boot_offset() noexcept {
  char text[256];
  char text_of_children[64];
  const auto ours = read_link("/proc/self/ns/time", text);
  if (ours.empty()) {  // no time namespaces, or not readable
    return errno == ENOENT ? std::optional<std::int64_t>(0) : std::nullopt;
  }
  // The offsets in /proc belong to the namespace in which children are created.
  if (ours != read_link("/proc/self/ns/time_for_children", text_of_children) ||
      !read_text("/proc/self/timens_offsets", text)) {
    return std::nullopt;
  }
  const char* const line = std::strstr(text, "boottime");
  long long seconds = 0;
  long long nanoseconds = 0;  // not negative, even if the seconds are
  if (line == nullptr || std::sscanf(line, "boottime %lld %lld", &seconds, &nanoseconds) != 2) {
    return std::nullopt;
  }
  const long long n_per_second = ::sysconf(_SC_CLK_TCK);
  return seconds * n_per_second + nanoseconds * n_per_second / 1'000'000'000;
}

/// nullopt: it cannot be read, or is gone.
std::optional<Stat> read_stat(pid_t pid) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  char text[1024];
  if (!read_text(path, text)) return std::nullopt;
  // The second field is the program's name in parentheses, and may hold any character.
  const char* field = std::strrchr(text, ')');
  Stat stat;
  unsigned long long user = 0;
  unsigned long long system = 0;
  unsigned long long n_threads = 0;
  unsigned long long start_time = 0;
  unsigned long long n_pages = 0;
  // Fields 3 (state), 14 and 15 (processor time), 20 (threads), 22 (start time), 24 (resident
  // pages).
  const int n_read =
      field == nullptr
          ? 0
          : std::sscanf(field + 1,
                        " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu %*s %*s "
                        "%*s %*s %llu %*s %llu %*s %llu",
                        &stat.state, &user, &system, &n_threads, &start_time, &n_pages);
  if (n_read != 6) return std::nullopt;
  stat.n_cpu_ticks = user + system;
  stat.n_threads = n_threads;
  stat.start_time = start_time;
  stat.n_resident_pages = n_pages;
  return stat;
}

/// With the start time relative to the initial time namespace, for every reader; 0 if unknown.
std::optional<Stat> read_identity(pid_t pid) noexcept {
  auto stat = read_stat(pid);
  if (!stat) return std::nullopt;
  const auto offset = boot_offset();
  if (!offset && (errno == EMFILE || errno == ENFILE)) return std::nullopt;
  stat->start_time = offset ? stat->start_time - static_cast<std::uint64_t>(*offset) : 0;
  return stat;
}

/// Both are truncated to whole ticks, one before an offset is added and one after.
bool is_same_start(std::uint64_t a, std::uint64_t b) noexcept { return a + 1 >= b && b + 1 >= a; }

bool is_known_gone(pid_t pid) noexcept { return ::kill(pid, 0) != 0 && errno == ESRCH; }

}  // namespace

UniqueFd open_pidfd(pid_t pid) noexcept {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  static_cast<void>(pid);
  return {};
#endif
}

bool has_shared_inode(int fd) noexcept {
  struct statfs status {};
  return ::fstatfs(fd, &status) == 0 && status.f_type == ANON_INODE_FS_MAGIC;
}

bool is_pidfd_of(int fd, pid_t pid) noexcept {
  if (fd < 0 || pid <= 0 || !is_proc_of_this_namespace()) return false;
  char path[40];
  std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  char text[1024];
  if (!read_text(path, text)) return false;
  const char* const line = std::strstr(text, "\nPid:");
  return line != nullptr && std::atoi(line + std::strlen("\nPid:")) == pid;
}

void ReservedFd::take() noexcept {
  if (of_ != nullptr && of_->is_intact()) {
    spare_ = GuardedFd(UniqueFd(::fcntl(of_->get(), F_DUPFD_CLOEXEC, 0)));
  }
}

std::uint64_t namespace_of(const char* kind) noexcept {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
  struct stat status {};
  return ::stat(path, &status) == 0 ? status.st_ino : 0;
}

std::string boot_id() {
  char text[64];
  if (!read_text("/proc/sys/kernel/random/boot_id", text)) return {};
  return {text, std::strcspn(text, "\n")};
}

std::uint64_t process_start_time(pid_t pid) noexcept {
  const auto stat = is_proc_of_this_namespace() ? read_identity(pid) : std::nullopt;
  return stat ? stat->start_time : 0;
}

ProcessUse process_use(pid_t pid) noexcept {
  if (pid <= 0) return {};
  const Stat stat = read_stat(pid).value_or(Stat());
  return {
      .cpu_s = static_cast<double>(stat.n_cpu_ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK)),
      .memory_bytes = stat.n_resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
}

ProcessState process_state(pid_t pid, std::uint64_t start_time, ReservedFd* spare) noexcept {
  if (pid <= 0) return ProcessState::unknown;
  if (is_known_gone(pid)) return ProcessState::gone;
  if (start_time == 0 || !is_proc_of_this_namespace()) return ProcessState::unknown;
  auto stat = read_identity(pid);
  if (!stat && (errno == EMFILE || errno == ENFILE) && spare != nullptr) {
    stat = spare->with_free_fd([pid] { return read_identity(pid); });
  }
  if (!stat) return is_known_gone(pid) ? ProcessState::gone : ProcessState::unknown;
  if (stat->start_time == 0) return ProcessState::unknown;
  if (!is_same_start(stat->start_time, start_time)) return ProcessState::gone;
  switch (stat->state) {
    case 'Z':
    case 'X':
    case 'x': return stat->n_threads > 1 ? ProcessState::alive : ProcessState::gone;
    case 'T':
    case 't': return ProcessState::stopped;
    case 'R': return ProcessState::running;
    default: return ProcessState::sleeping;
  }
}

std::uint64_t pidfd_inode(pid_t pid) noexcept {
  const GuardedFd pidfd(open_pidfd(pid));
  constexpr auto kPidFs = 0x50494446;
  struct statfs status {};
  const bool is_unique = pidfd && ::fstatfs(pidfd.get(), &status) == 0 && status.f_type == kPidFs;
  return is_unique ? pidfd.inode() : 0;
}

WatchedProcess::WatchedProcess(const ProcessIdentity& identity, bool keeps_pidfd) noexcept
    : pid_(identity.pid), start_time_(identity.start_time) {
  if (pid_ <= 0) return;
  // The inode identifies the process with a quarter of the system calls that /proc takes.
  const bool has_inode = identity.pidfd_inode != 0;
  const bool reads_proc = start_time_ == 0 || (keeps_pidfd && !has_inode);
  const std::uint64_t start_time_now = reads_proc ? process_start_time(pid_) : start_time_;
  if (start_time_ == 0) start_time_ = start_time_now;
  // Otherwise another process has the pid now.
  if (!keeps_pidfd || !is_same_start(start_time_, start_time_now)) return;
  GuardedFd pidfd = has_inode ? GuardedFd(open_pidfd(pid_)) : GuardedFd(open_pidfd(pid_), pid_);
  if (!has_inode || pidfd.inode() == identity.pidfd_inode) pidfd_ = std::move(pidfd);
}

/// Returns alive, gone or unknown. A pidfd becomes readable when the last thread has ended.
ProcessState WatchedProcess::query_pidfd() const noexcept {
#ifdef SYS_pidfd_send_signal
  if (!pidfd_.is_intact() ||
      (::syscall(SYS_pidfd_send_signal, pidfd_.get(), 0, nullptr, 0) != 0 && errno == EBADF)) {
    return ProcessState::unknown;
  }
  pollfd entry{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  const int n = ::poll(&entry, 1, 0);
  if (n < 0 || (entry.revents & POLLNVAL) != 0) return ProcessState::unknown;
  return n == 0 ? ProcessState::alive : ProcessState::gone;
#else
  return ProcessState::unknown;
#endif
}

bool WatchedProcess::is_gone(ReservedFd& spare) const noexcept {
  const ProcessState state = query_pidfd();
  return (state == ProcessState::unknown ? process_state(pid_, start_time_, &spare) : state) ==
         ProcessState::gone;
}

ProcessState WatchedProcess::state(ReservedFd& spare) const noexcept {
  const ProcessState known = query_pidfd();
  if (known == ProcessState::gone) return known;
  const ProcessState state = process_state(pid_, start_time_, &spare);
  const bool is_less_specific = state == ProcessState::gone || state == ProcessState::unknown;
  return known == ProcessState::alive && is_less_specific ? known : state;
}

}  // namespace lockstep::base
