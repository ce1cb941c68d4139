#pragma once

#include <sys/types.h>
#include <termios.h>

#include <optional>

#include "base/fd.hpp"
#include "run/child_group.hpp"

namespace lockstep::run {

/// The foreground of the launcher's controlling terminal, if it has one.
///
/// A terminal gives what is typed, and the signals of its keys, to one process group. Each rank
/// leads a group of its own, so a rank that reads the terminal gets SIGTTIN, or SIGTTOU if it
/// changes the terminal's mode, and stops; its launcher sees that. If the launcher's group has the
/// foreground, it lends it to the rank's, and continues the rank. Ctrl-C and the end of the
/// terminal then signal that group, and not the launcher: a process of it, the relay, signals the
/// launcher's group as the terminal would have. Ctrl-Z stops the rank, which its launcher sees.
///
/// A rank that never reads the terminal leaves everything as it was. Of one that has read it, the
/// terminal's mode is restored.
class Foreground {
 public:
  Foreground();
  ~Foreground();
  Foreground(const Foreground&) = delete;
  Foreground& operator=(const Foreground&) = delete;

  /// Whether fd is the controlling terminal, which only the foreground may read.
  static bool rules(int fd) noexcept;
  /// Whether the launcher's group has the foreground.
  bool is_own() const noexcept;
  /// Lends it to the rank that reads, one for all calls. Returns false if it is not the launcher's.
  bool lend_to(const ChildGroup& rank) noexcept;
  bool is_lent() const noexcept { return borrower_ != 0; }
  void take_back() noexcept;
  /// Takes it back for good. A signal of the terminal to the borrower is then pending here.
  void end() noexcept;
  bool is_relay(pid_t sender) const noexcept { return sender > 0 && sender == relay_.leader(); }

 private:
  void start_relay(pid_t group) noexcept;

  base::UniqueFd terminal_;
  std::optional<termios> mode_;  ///< before it was lent
  pid_t borrower_ = 0;
  ChildGroup relay_;  // it leads no group: only to reap it
};

}  // namespace lockstep::run
