#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

/// A trace in memory: read from the files that ranks wrote to a folder, or from a FILE.json.
namespace lockstep::cli::tracing {

/// Ids for texts; a trace has few distinct ones, each many times.
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
  int world;  ///< rows with the same world are peers
  int n_restarts;
  int system_pid;
  std::string host;
  std::uint64_t n_lost = 0;  ///< events dropped for lack of space
  std::string why_lost{};
};

struct Event {
  enum class Kind : std::uint8_t { collective, message, region };
  enum class State : std::uint8_t { finished, failed, under_way };

  std::int64_t start_ns;
  std::int64_t end_ns;    ///< invalid if unfinished
  std::uint32_t row;      ///< index into Trace::rows
  std::int32_t thread;    ///< the system's thread id
  std::uint32_t name;     ///< of the operation or region; this and the next three: ids of texts
  std::uint32_t group{};  ///< this and the rest: only for calls
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

/// The correction applied to another host's clock.
struct Correction {
  std::string clock;
  std::int64_t added_ns;
  std::int64_t within_ns;  ///< maximum error; -1: unknown
};

struct Trace {
  Texts texts;
  std::vector<Row> rows;
  std::vector<Thread> threads;
  std::vector<Event> events;  ///< in start order within each thread of each row
  std::string clock;          ///< clock of these times; see internal::name_of_clock
  std::int64_t wall_ns = 0;   ///< wall-clock time minus that clock
  std::vector<Correction> corrections;
};

/// How long a call waited for its last peer, and which one that was.
struct Wait {
  std::int64_t n_ns = 0;
  std::uint32_t row = 0;
};

/// Reads what the ranks of this system wrote to a folder (LOCKSTEP_TRACE), during or after the run.
/// Throws UsageError, SystemError.
Trace read_folder(const std::string& dir);
/// Reads the output of write(), even if reformatted. Throws UsageError if it is not such a file.
Trace read_file(const std::string& path);
/// Merges all traces into the first one's time. A clock is moved to the middle of its bounds: no
/// rank leaves a barrier, all_reduce, all_gather, reduce_scatter or all_to_all before its last peer
/// has entered it. Throws UsageError if two contain the same rank.
Trace merge(std::vector<Trace> traces);
/// One per event: from a call's start to its last peer's. Zero for a call that ended before that or
/// has no peers in the trace.
std::vector<Wait> waits_of(const Trace& trace);
/// Writes FILE in the format of Chrome's trace viewer and Perfetto, atomically. Throws
/// SystemError.
void write(const Trace& trace, const std::string& path);
/// Human-readable.
std::string summary_of(const Trace& trace);

/// "rank 1", plus the start or world if it is not the first.
std::string name_of(const Row& row);

}  // namespace lockstep::cli::tracing
