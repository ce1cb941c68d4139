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

// How tests order events: by waiting for observable conditions, never by time. Each wait has a
// watchdog.
namespace lockstep::test {

/// Polls until `condition` holds; false if `limit` passed first, which only happens in a hang.
template <class Condition>
bool wait_until(const Condition& condition,
                std::chrono::milliseconds limit = std::chrono::minutes(10)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// State of a thread of any process, or of a process's first thread: R runs, S sleeps (it waits),
/// T is stopped, Z and X have ended. Also X if there is no such thread.
inline char thread_state(pid_t tid) {
  const std::string id = std::to_string(tid);
  // Not /proc/TID/stat, which qemu makes up for the process that asks, without a state.
  std::ifstream file("/proc/" + id + "/task/" + id + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // throws nothing if the thread ends between open and read
  const std::size_t name_end = text.rfind(") ");  // the name may contain any character
  return name_end == std::string::npos || name_end + 2 >= text.size() ? 'X' : text[name_end + 2];
}

inline bool is_asleep(pid_t tid) { return thread_state(tid) == 'S'; }

/// How often this thread has slept, including a current sleep.
inline long n_sleeps(pid_t tid) {
  std::ifstream file("/proc/" + std::to_string(tid) + "/status");
  std::string text;
  std::getline(file, text, '\0');
  const std::string name = "\nvoluntary_ctxt_switches:";
  const std::size_t at = text.find(name);
  return at == std::string::npos ? 0 : std::stol(text.substr(at + name.size()));
}

/// Waits until the thread sleeps. `tid`: an atomic is 0 until the thread has set it.
template <class Tid>
bool wait_until_asleep(const Tid& tid) {
  return wait_until([&] { return is_asleep(static_cast<pid_t>(tid)); });
}

/// Sleeps until a deadline that begins about now has passed. For this only: it orders no events.
inline void outlast(std::chrono::milliseconds deadline) {
  std::this_thread::sleep_for(deadline * 3 / 2);
}

/// A counter shared by threads and forked processes, to synchronise them.
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
