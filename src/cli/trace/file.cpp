#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <lockstep/error.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/atomic_file.hpp"
#include "cli/files.hpp"
#include "cli/trace/trace_data.hpp"

namespace lockstep::cli::tracing {
namespace {

using nlohmann::json;

constexpr const char* kCollective = "collective";
constexpr const char* kMessage = "message";
constexpr const char* kRegion = "region";

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

/// Names may contain arbitrary bytes; JSON is UTF-8.
std::string quoted(const std::string& text) {
  return json(text).dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false,
                         json::error_handler_t::replace);
}

const char* category_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::collective: return kCollective;
    case Event::Kind::message: return kMessage;
    case Event::Kind::region: return kRegion;
  }
  return kRegion;
}

/// Microseconds, the viewers' unit, with nanosecond digits.
std::string us(std::int64_t n_ns) {
  return fmt::format("{}{}.{:03}", n_ns < 0 ? "-" : "", std::abs(n_ns) / 1000,
                     std::abs(n_ns) % 1000);
}

/// Writes one event per line and keeps none of them.
class Writer {
 public:
  Writer(const Trace& trace, std::FILE* file) : trace_(trace), file_(file) {}

  void write() {
    std::int64_t origin_ns = INT64_MAX;
    for (const Event& event : trace_.events) origin_ns = std::min(origin_ns, event.start_ns);
    origin_ns_ = trace_.events.empty() ? 0 : origin_ns;
    write_head();
    for (std::size_t i = 0; i < trace_.rows.size(); ++i) {
      const Row& row = trace_.rows[i];
      write_name("process_name", row.pid, 0, fmt::format("{} ({})", name_of(row), row.host));
      line(fmt::format(
          R"({{"ph":"M","name":"process_sort_index","pid":{},"args":{{"sort_index":{}}}}})",
          row.pid, i));
    }
    for (const Thread& thread : trace_.threads) {
      write_name("thread_name", trace_.rows[thread.row].pid, thread.thread, thread.name);
    }
    const std::vector<Wait> waits = waits_of(trace_);
    for (std::size_t i = 0; i < waits.size(); ++i) write_event(trace_.events[i], waits[i]);
    put("\n]}\n");
  }

 private:
  void put(const std::string& text) { std::fwrite(text.data(), 1, text.size(), file_); }
  void line(const std::string& text) {
    put((is_first_ ? "\n" : ",\n") + text);
    is_first_ = false;
  }

  void write_head() {
    json ranks = json::array();
    for (const Row& row : trace_.rows) {
      ranks.push_back({{"pid", row.pid},
                       {"rank", row.rank},
                       {"world", row.world},
                       {"restart", row.n_restarts},
                       {"system_pid", row.system_pid},
                       {"host", row.host},
                       {"lost_events", row.n_lost},
                       {"why_lost", row.why_lost}});
    }
    json corrections = json::array();
    for (const Correction& correction : trace_.corrections) {
      corrections.push_back({{"clock", correction.clock},
                             {"added_ns", correction.added_ns},
                             {"within_ns", correction.within_ns}});
    }
    const json head = {{"lockstep_trace", 1},       {"clock", trace_.clock},
                       {"origin_ns", origin_ns_},   {"wall_ns", trace_.wall_ns},
                       {"ranks", std::move(ranks)}, {"clock_corrections", std::move(corrections)}};
    put(fmt::format("{{\"displayTimeUnit\":\"ns\",\n\"otherData\":{},\n\"traceEvents\":[",
                    head.dump(-1, ' ', false, json::error_handler_t::replace)));
  }

  void write_name(const char* what, int pid, int thread, const std::string& name) {
    line(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what,
                     pid, thread, quoted(name)));
  }

  void write_event(const Event& event, const Wait& wait) {
    const int pid = trace_.rows[event.row].pid;
    const bool is_over = event.state != Event::State::under_way;
    std::string text =
        fmt::format(R"({{"ph":"{}","name":{},"cat":"{}","pid":{},"tid":{},"ts":{})",
                    is_over ? 'X' : 'B', text_of(event.name), category_of(event.kind), pid,
                    event.thread, us(event.start_ns - origin_ns_));
    auto out = std::back_inserter(text);
    if (is_over) fmt::format_to(out, ",\"dur\":{}", us(event.end_ns - event.start_ns));
    if (event.kind != Event::Kind::region) {
      fmt::format_to(out, R"(,"args":{{"group":{},"sequence":{},"where":{})", text_of(event.group),
                     event.sequence, text_of(event.where));
      if (event.collective != 0) fmt::format_to(out, ",\"collective\":{}", event.collective);
      if (event.type != 0) {
        fmt::format_to(out, ",\"bytes\":{},\"type\":{}", event.n_bytes, text_of(event.type));
      }
      if (event.root >= 0) fmt::format_to(out, ",\"root\":{}", event.root);
      if (event.state == Event::State::failed) text += ",\"failed\":true";
      text += '}';
    }
    line(text + '}');
    if (wait.n_ns <= 0) return;
    line(fmt::format(
        R"({{"ph":"X","name":"wait","cat":"wait","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"for":{}}}}})",
        pid, event.thread, us(event.start_ns - origin_ns_), us(wait.n_ns),
        quoted(name_of(trace_.rows[wait.row]))));
  }

  const std::string& text_of(std::uint32_t number) {
    if (number >= quoted_.size()) quoted_.resize(number + 1);
    std::string& text = quoted_[number];
    if (text.empty()) text = quoted(trace_.texts[number]);
    return text;
  }

  const Trace& trace_;
  std::FILE* file_;
  std::int64_t origin_ns_ = 0;
  bool is_first_ = true;
  std::deque<std::string> quoted_;  // not a vector: several texts of a line are used at once
};

/// Takes events one by one from the parser, which then discards them.
class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  Trace read() {
    base::UniqueFd fd = open_regular("lockstep trace", path_);
    const std::unique_ptr<std::FILE, CloseFile> file(::fdopen(fd.get(), "rb"));
    if (!file) reject(std::strerror(errno));
    fd.release();
    json rest;
    try {
      rest = json::parse(file.get(), [this](int depth, json::parse_event_t what, json& value) {
        check_depth(depth, what, value);
        // {"traceEvents": [ {...}, ... ]}
        if (depth == 1 && what == json::parse_event_t::key) {
          is_in_events_ = value == "traceEvents";
        }
        if (depth != 2 || what != json::parse_event_t::object_end || !is_in_events_) return true;
        take(value);
        return false;
      });
      take_head(rest.at("otherData"));
    } catch (const json::exception& error) {
      reject(error.what());
    }
    return std::move(trace_);
  }

 private:
  [[noreturn]] void reject(const std::string& why) const {
    throw UsageError({.operation = "lockstep trace"},
                     fmt::format("'{}' is not a trace written by lockstep (lockstep run --trace "
                                 "FILE, lockstep trace merge): {}",
                                 path_, why));
  }

  /// The header may precede or follow the events: until then a row is identified by its pid.
  std::uint32_t row_of(int pid) {
    const auto [found, is_new] =
        rows_.try_emplace(pid, static_cast<std::uint32_t>(trace_.rows.size()));
    if (is_new) {
      trace_.rows.push_back(
          {.pid = pid, .rank = pid, .world = 0, .n_restarts = 0, .system_pid = 0, .host = {}});
    }
    return found->second;
  }

  static std::int64_t ns(const json& value) { return std::llround(value.get<double>() * 1000); }

  void take(const json& value) {
    const auto& phase = value.at("ph").get_ref<const std::string&>();
    const std::uint32_t row = row_of(value.at("pid").get<int>());
    if (phase == "M") {
      if (value.at("name") != "thread_name") return;
      trace_.threads.push_back({row, value.at("tid").get<std::int32_t>(),
                                value.at("args").at("name").get<std::string>()});
      return;
    }
    const auto& category = value.at("cat").get_ref<const std::string&>();
    if (category == "wait") return;  // derived from the other events
    Event event{.start_ns = ns(value.at("ts")),
                .end_ns = 0,
                .row = row,
                .thread = value.at("tid").get<std::int32_t>(),
                .name = number(value.at("name")),
                .kind = Event::Kind::region,
                .state = Event::State::under_way};
    if (phase == "X") {
      event.end_ns = event.start_ns + ns(value.at("dur"));
      event.state = Event::State::finished;
    }
    if (category != kRegion) {
      const json& call = value.at("args");
      event.kind = category == kCollective ? Event::Kind::collective : Event::Kind::message;
      event.group = number(call.at("group"));
      event.where = number(call.at("where"));
      event.sequence = call.at("sequence").get<std::uint64_t>();
      event.collective = call.value("collective", std::uint64_t{0});
      event.n_bytes = call.value("bytes", std::uint64_t{0});
      if (call.contains("type")) event.type = number(call.at("type"));
      event.root = call.value("root", -1);
      if (call.value("failed", false)) event.state = Event::State::failed;
    }
    trace_.events.push_back(event);
  }

  void take_head(const json& head) {
    if (head.at("lockstep_trace") != 1) reject("it is of another version");
    trace_.clock = head.at("clock").get<std::string>();
    trace_.wall_ns = head.at("wall_ns").get<std::int64_t>();
    for (const json& value : head.at("ranks")) {
      const int pid = value.at("pid").get<int>();
      trace_.rows[row_of(pid)] = {.pid = pid,
                                  .rank = value.at("rank").get<int>(),
                                  .world = value.at("world").get<int>(),
                                  .n_restarts = value.at("restart").get<int>(),
                                  .system_pid = value.at("system_pid").get<int>(),
                                  .host = value.at("host").get<std::string>(),
                                  .n_lost = value.at("lost_events").get<std::uint64_t>(),
                                  .why_lost = value.at("why_lost").get<std::string>()};
    }
    for (const json& value : head.at("clock_corrections")) {
      trace_.corrections.push_back({value.at("clock").get<std::string>(),
                                    value.at("added_ns").get<std::int64_t>(),
                                    value.at("within_ns").get<std::int64_t>()});
    }
    const auto origin_ns = head.at("origin_ns").get<std::int64_t>();
    for (Event& event : trace_.events) {
      event.start_ns += origin_ns;
      event.end_ns += origin_ns;
    }
  }

  std::uint32_t number(const json& text) {
    return trace_.texts.number(text.get_ref<const std::string&>());
  }

  std::string path_;
  Trace trace_;
  std::unordered_map<int, std::uint32_t> rows_;
  bool is_in_events_ = false;
};

}  // namespace

Trace read_file(const std::string& path) { return Reader(path).read(); }

void write(const Trace& trace, const std::string& path) {
  std::signal(SIGXFSZ,
              SIG_IGN);  // exceeding a file size limit (ulimit -f) is an error like a full disk
  try {
    base::AtomicFile whole(path, /*mode=*/0666);
    const std::unique_ptr<std::FILE, CloseFile> file(
        ::fdopen(::fcntl(whole.fd(), F_DUPFD_CLOEXEC, 0), "w"));
    const auto check = [](bool is_ok) {
      if (!is_ok) throw std::system_error(errno, std::generic_category());
    };
    check(file != nullptr);
    Writer(trace, file.get()).write();
    check(std::ferror(file.get()) == 0 && std::fflush(file.get()) == 0);
    whole.commit();
  } catch (const std::system_error& error) {
    throw SystemError({.operation = "lockstep trace"}, error.code().value(),
                      fmt::format("cannot write '{}'", path));
  }
}

}  // namespace lockstep::cli::tracing
