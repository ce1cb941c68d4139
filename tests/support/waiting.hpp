#pragma once

#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <thread>

// How tests order events: by waiting for what can be observed, never by time. Each wait has a
// watchdog.
namespace lockstep::test {

/// Polls until `condition` holds; false when `limit` passed first, which only a hang takes.
template <class Condition>
bool wait_until(const Condition& condition,
                std::chrono::milliseconds limit = std::chrono::seconds(120)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// State of a thread of any process, or of a process's first thread: R runs, S sleeps (it waits for
/// somebody), T is stopped, Z and X have ended. X too where there is none.
inline char thread_state(pid_t tid) {
  std::ifstream file("/proc/" + std::to_string(tid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(") ");  // the name may hold any character
  return name_end == std::string::npos || name_end + 2 >= text.size() ? 'X' : text[name_end + 2];
}

inline bool is_asleep(pid_t tid) { return thread_state(tid) == 'S'; }

/// How often this thread has slept, also if it sleeps now.
inline long n_sleeps(pid_t tid) {
  std::ifstream file("/proc/" + std::to_string(tid) + "/status");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string name = "\nvoluntary_ctxt_switches:";
  const std::size_t at = text.find(name);
  return at == std::string::npos ? 0 : std::stol(text.substr(at + name.size()));
}

/// Until the thread sleeps. `tid`: 0, in an atomic, until the thread has told it.
template <class Tid>
bool wait_until_asleep(const Tid& tid) {
  return wait_until([&] { return is_asleep(static_cast<pid_t>(tid)); });
}

/// Sleeps until a deadline has passed that begins about now. For nothing else: it orders no events.
inline void outlast(std::chrono::milliseconds deadline) {
  std::this_thread::sleep_for(deadline * 3 / 2);
}

/// A count that threads and forked processes share: a meeting point of theirs.
class SharedCount {
 public:
  SharedCount() {
    void* const page = ::mmap(nullptr, sizeof *count_, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
    if (page == MAP_FAILED) throw std::bad_alloc();
    count_ = new (page) std::atomic<int>{0};
  }
  ~SharedCount() { ::munmap(count_, sizeof *count_); }
  SharedCount(const SharedCount&) = delete;
  SharedCount& operator=(const SharedCount&) = delete;

  void raise() const { ++*count_; }
  void store(int value) const { *count_ = value; }
  int value() const { return *count_; }
  bool wait_for(int value) const {
    return wait_until([&] { return *count_ >= value; });
  }

 private:
  std::atomic<int>* count_ = nullptr;
};

}  // namespace lockstep::test
