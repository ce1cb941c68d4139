#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

/// A trace as the command holds it: what ranks left in a folder, or what a FILE.json has.
namespace lockstep::cli::tracing {

/// Numbers for texts, of which a trace has few, each many times.
class Texts {
 public:
  std::uint32_t number(std::string_view text);
  const std::string& operator[](std::uint32_t number) const { return texts_[number]; }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };

  std::vector<std::string> texts_{""};
  std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>> numbers_{{"", 0}};
};

/// A row of the trace: one rank of one start of one world.
struct Row {
  int pid;  ///< in the trace: the rank, in the first world of the first start
  int rank;
  int world;  ///< ranks of the same are peers
  int n_restarts;
  int system_pid;
  std::string host;
  std::uint64_t n_lost = 0;  ///< events that found no room
  std::string why_lost{};
};

struct Event {
  enum class Kind : std::uint8_t { collective, message, region };
  enum class State : std::uint8_t { finished, failed, under_way };

  std::int64_t start_ns;
  std::int64_t end_ns;    ///< not where it is under way
  std::uint32_t row;      ///< index into Trace::rows
  std::int32_t thread;    ///< as the system numbers it
  std::uint32_t name;     ///< of the operation or region; this and the next three: numbers of texts
  std::uint32_t group{};  ///< this and the rest: of calls
  std::uint32_t type{};
  std::uint32_t where{};
  std::uint64_t sequence{};
  std::uint64_t collective{};
  std::uint64_t n_bytes{};
  int root = -1;
  Kind kind;
  State state;
};

struct Thread {
  std::uint32_t row;
  std::int32_t thread;
  std::string name;
};

/// Another host's clock, as it was corrected.
struct Correction {
  std::string clock;
  std::int64_t added_ns;
  std::int64_t within_ns;  ///< how far off it may be; -1: not known
};

struct Trace {
  Texts texts;
  std::vector<Row> rows;
  std::vector<Thread> threads;
  std::vector<Event> events;  ///< of each thread of each row: in the order in which they began
  std::string clock;          ///< whose times these are; see internal::name_of_clock
  std::int64_t wall_ns = 0;   ///< what that clock lacked to the time of day
  std::vector<Correction> corrections;
};

/// How long a call waited for the last of its peers, and for which.
struct Wait {
  std::int64_t n_ns = 0;
  std::uint32_t row = 0;
};

/// What the ranks of this system left in a folder (LOCKSTEP_TRACE), while they ran or after. Throws
/// UsageError, SystemError.
Trace read_folder(const std::string& dir);
/// What write() wrote, whatever reformatted it since. Throws UsageError where it is no such file.
Trace read_file(const std::string& path);
/// All of them in the first one's time. A clock is moved to the middle of where it must lie: no
/// rank leaves a barrier, all_reduce, all_gather, reduce_scatter or all_to_all before its last peer
/// has come to it. Throws UsageError where two hold the same rank.
Trace merge(std::vector<Trace> traces);
/// One for each event. From a call's start to its last peer's; nothing for a call that ended before
/// that, or that has no peers in the trace.
std::vector<Wait> waits_of(const Trace& trace);
/// FILE in the form of Chrome's trace viewer and Perfetto: all of it or nothing. Throws
/// SystemError.
void write(const Trace& trace, const std::string& path);
/// For people.
std::string summary_of(const Trace& trace);

/// "rank 1", and the start or world where it is not the first.
std::string name_of(const Row& row);

}  // namespace lockstep::cli::tracing
