#include "python/interrupts.hpp"

#include <nanobind/nanobind.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "python/gil.hpp"

namespace nb = nanobind;

namespace lockstep::python {
namespace {

constexpr std::chrono::milliseconds kInterval{100};
/// Checking whether the handler is ours takes a system call, a tenth of a short call's time.
constexpr std::chrono::milliseconds kCheckInterval{1};

constinit std::atomic<bool> is_in_call{false};
constinit std::atomic<bool> is_interrupt_pending{false};
/// The handler that ours calls. Written only while ours is not installed.
constinit struct sigaction previous_handler {};

void on_interrupt(int number, siginfo_t* info, void* context) {
  if (is_in_call.load(std::memory_order_relaxed))
    is_interrupt_pending.store(true, std::memory_order_relaxed);
  if ((previous_handler.sa_flags & SA_SIGINFO) != 0) {
    previous_handler.sa_sigaction(number, info, context);
  } else {
    previous_handler.sa_handler(number);
  }
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_interrupt;
}

/// Python reinstalls its handler at each signal.signal().
void install_handler() {
  struct sigaction now {};
  if (::sigaction(SIGINT, nullptr, &now) != 0 || is_ours(now)) return;
  if ((now.sa_flags & SA_SIGINFO) == 0 &&
      (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)) {
    return;
  }
  previous_handler = now;
  struct sigaction ours = now;
  ours.sa_flags |= SA_SIGINFO;
  ours.sa_sigaction = on_interrupt;
  ::sigaction(SIGINT, &ours, nullptr);
}

void restore_handler() {
  struct sigaction now {};
  if (::sigaction(SIGINT, nullptr, &now) == 0 && is_ours(now)) {
    ::sigaction(SIGINT, &previous_handler, nullptr);
  }
}

bool raises_keyboard_interrupt() {
  const nb::gil_scoped_acquire gil;
  try {
    const auto signal = nb::module_::import_("signal");
    return signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
  } catch (const nb::python_error&) {
    return false;
  }
}

/// Guards the watcher, and what is said to be guarded in it.
constinit std::mutex mutex;

class Watcher {
 public:
  Watcher() : thread_([this] { loop(); }) {
    ::pthread_setname_np(thread_.native_handle(), "lockstep-sigint");
  }
  ~Watcher() {
    {
      const std::lock_guard lock(mutex);
      is_closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
    restore_handler();
  }
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  /// Under the mutex.
  const Group* enter(const Group* group) {
    if (group != nullptr) reinstall_if_due();  // else a signal would not end the wait
    is_interrupt_pending.store(false, std::memory_order_relaxed);
    is_in_call.store(group != nullptr, std::memory_order_relaxed);
    ++n_calls_;
    return std::exchange(group_, group);
  }

 private:
  void reinstall_if_due() {
    const auto now = std::chrono::steady_clock::now();
    if (now - checked_at_ < kCheckInterval) return;
    checked_at_ = now;
    install_handler();
  }
  void loop() {
    std::unique_lock lock(mutex);
    for (; !is_closing_; changed_.wait_for(lock, kInterval)) {
      install_handler();
      if (!is_interrupt_pending.exchange(false, std::memory_order_relaxed)) continue;
      const auto n_calls = n_calls_;
      lock.unlock();  // the GIL's holder may want it
      const bool raises = raises_keyboard_interrupt();
      lock.lock();
      if (raises && group_ != nullptr && n_calls == n_calls_) {
        group_->abandon("KeyboardInterrupt");
      }
    }
  }

  std::condition_variable changed_;
  const Group* group_ = nullptr;                        // the main thread's; guarded
  std::uint64_t n_calls_ = 0;                           // guarded
  std::chrono::steady_clock::time_point checked_at_{};  // guarded
  bool is_closing_ = false;                             // guarded
  std::thread thread_;                                  // last: it uses the other members
};

constinit Watcher* watcher = nullptr;               // guarded
constinit std::atomic<pthread_t> watched_thread{};  // the main thread while there is a watcher

bool is_watched() {
  return ::pthread_equal(watched_thread.load(std::memory_order_relaxed), ::pthread_self()) != 0;
}

constinit std::atomic<bool> is_python_ending{false};
enum class IsDaemon : std::uint8_t { unknown, no, yes };
constinit thread_local IsDaemon is_daemon = IsDaemon::unknown;

/// Whether this thread is a daemon of Python. Of threads that Python did not start, which have a
/// dummy object, callbacks may run at its end.
IsDaemon find_daemon() {
  const auto threading = nb::module_::import_("threading");
  const nb::object thread = threading.attr("current_thread")();
  const bool is_dummy = nb::isinstance(thread, threading.attr("_DummyThread"));
  return !is_dummy && nb::cast<bool>(thread.attr("daemon")) ? IsDaemon::yes : IsDaemon::no;
}

const Group* enter(const Group* group) {
  const std::lock_guard lock(mutex);  // destroy_dist on another thread ends the watcher
  return watcher == nullptr ? nullptr : watcher->enter(group);
}

}  // namespace

void watch_interrupts() {
  const auto threading = nb::module_::import_("threading");
  const nb::object main = threading.attr("main_thread")();
  if (is_watched() || !main.is(threading.attr("current_thread")())) return;
  // A fork is not a rank: it has no such thread, and the mutex may be locked.
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] {
    std::construct_at(&mutex);
    watcher = nullptr;
    watched_thread.store({}, std::memory_order_relaxed);
  });
  static_cast<void>(registered);
  const std::lock_guard lock(mutex);
  watcher = new Watcher;
  watched_thread.store(::pthread_self(), std::memory_order_relaxed);
}

void stop_watching_interrupts() noexcept {
  const GilReleased released;
  std::unique_lock lock(mutex);
  watched_thread.store({}, std::memory_order_relaxed);
  Watcher* const ended = std::exchange(watcher, nullptr);
  lock.unlock();
  delete ended;
}

bool begin_call(const Group* group, const Group** before) {
  *before = nullptr;
  if (!is_watched()) {
    if (is_daemon == IsDaemon::unknown) is_daemon = find_daemon();
    return true;
  }
  *before = enter(group);
  // The signal may have arrived after Python's last check and before is_in_call was set.
  if (PyErr_CheckSignals() == 0) return true;
  enter(*before);
  return false;
}

void end_call(const Group* before) {
  if (is_watched()) {
    enter(before);
  } else if (is_daemon == IsDaemon::yes && is_python_ending.load(std::memory_order_relaxed)) {
    stop_thread();
  }
}

void keep_daemons_in_calls() noexcept { is_python_ending = true; }

InterruptibleCall::InterruptibleCall(const Group* group) {
  if (!begin_call(group, &before_)) throw nb::python_error();
}

InterruptibleCall::~InterruptibleCall() { end_call(before_); }

}  // namespace lockstep::python
