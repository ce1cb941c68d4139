#include "engines/shared/bootstrap/launcher_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/fd_message.hpp"
#include "base/patience.hpp"
#include "base/text.hpp"

namespace lockstep::shared {
namespace {

using Clock = detail::JobClock;
using std::chrono::milliseconds;

constexpr std::uint64_t kNextWorld = 0x646c726f77747865ULL;
constexpr std::uint64_t kAddresses = 0x7365737365726464ULL;
constexpr std::uint64_t kStore = 0x65726f7473726464ULL;

/// Of addresses and of the store, bytes follow.
struct Request {
  std::uint64_t request;
  std::uint64_t number;
  std::int64_t limit_ms;
  std::int64_t last_generation;
  std::uint64_t world;
};

/// The memory of the addresses; n_ranks AddressEntry follow.
struct AddressesHead {
  std::uint32_t n_ranks;
  std::uint32_t key;
  std::int32_t n_cores;
};
struct AddressEntry {
  std::uint32_t n_bytes;
  std::int32_t host;
  std::array<char, kMaxAddressBytes> bytes;
};

/// With the descriptor of a segment, or why there is none. n_lost times Lost and n_joined ranks
/// follow; of the store, n_bytes.
struct LauncherReply {
  std::uint64_t request;
  std::uint64_t number;  ///< of the request
  std::int32_t is_refused;
  std::int32_t error_number;
  std::int32_t rank;
  std::int32_t size;
  std::int32_t world_rank;
  std::int32_t world_size;
  std::uint32_t generation;
  std::uint32_t n_lost;
  std::uint32_t n_joined;
  std::uint32_t n_bytes;
  std::array<char, 512> text;
};

/// Of a message: a job that lost more ranks at once than this tells of the first.
constexpr std::size_t kMostLost = 512, kMostJoined = 512;
constexpr std::size_t kAnswerBytes =
    sizeof(LauncherReply) +
    std::max(kMostLost * sizeof(Lost) + kMostJoined * sizeof(std::int32_t), kMaxStoreBytes);

template <class T>
std::vector<T> read_list(const std::byte*& bytes, std::uint32_t n) {
  std::vector<T> list(n);
  if (n > 0) std::memcpy(list.data(), bytes, n * sizeof(T));
  bytes += n * sizeof(T);
  return list;
}

template <class T>
void append(std::vector<std::byte>& bytes, const T* data, std::size_t n) {
  const auto* const first = reinterpret_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + n * sizeof(T));
}

/// No limit, and still no overflow.
constexpr milliseconds kYear = std::chrono::hours(24 * 365);

/// Waits until the socket can be read (POLLIN) or written to (POLLOUT). Returns false if `end`
/// comes first.
bool wait_for(int socket, short event, Clock::time_point end) {
  while (true) {
    pollfd entry{.fd = socket, .events = event, .revents = 0};
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
    const int timeout_ms = static_cast<int>(std::clamp<milliseconds::rep>(left, 0, 1000));
    if (::poll(&entry, 1, timeout_ms) > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

LauncherSocket make_launcher_socket() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw SystemError({.operation = "lockstep run"}, errno, "cannot make a socket for a rank");
  }
  return {.launcher = base::UniqueFd(ends[0]), .rank = base::UniqueFd(ends[1])};
}

namespace {

/// What the launcher has answered.
struct Answer {
  LauncherReply head{};
  std::vector<std::byte> bytes{};  ///< with the head
  base::UniqueFd fd{};
};

/// This process's requests are one at a time. No timed_mutex: ThreadSanitizer does not know its
/// waits.
class Turn {
 public:
  explicit Turn(Clock::duration at_most) {
    std::unique_lock lock(state_.mutex);
    is_ours_ = state_.ended.wait_for(lock, at_most, [this] { return !state_.is_taken; });
    if (is_ours_) state_.is_taken = true;
  }
  ~Turn() {
    if (!is_ours_) return;
    const std::lock_guard lock(state_.mutex);
    state_.is_taken = false;
    state_.ended.notify_one();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool is_ours() const { return is_ours_; }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable ended;
    bool is_taken = false;
  };
  /// Never destroyed: a thread may wait when the program ends.
  static State& state() {
    static auto& only = *new State;
    return only;
  }

  State& state_ = state();
  bool is_ours_ = false;
};

/// Sends the request, whose number it sets, with `bytes` behind it, and waits for its answer, for
/// `at_most`. `what`: is asked for. Throws what request_next_world throws.
Answer ask(int socket, Request request, std::string_view bytes, milliseconds at_most,
           std::string_view what, int rank, const Call& barrier) {
  const ErrorContext context = context_of(barrier, rank);
  const auto end = Clock::now() + std::min<milliseconds>(at_most, kYear);
  const Turn turn(end - Clock::now());
  if (!turn.is_ours()) {
    throw TimeoutError(context, fmt::format("another thread of this rank waits for `lockstep run`, "
                                            "which this one would ask for {}",
                                            what));
  }
  const auto throw_late = [&] {
    throw TimeoutError(
        context,
        fmt::format("`lockstep run` did not answer this rank, which asked for {}, within {:g} s; "
                    "is it stopped?",
                    what, std::chrono::duration<double>(barrier.timeout).count()));
  };
  static std::uint64_t n_requests = 0;
  request.number = ++n_requests;
  request.limit_ms = barrier.timeout.count();
  std::string message(reinterpret_cast<const char*>(&request), sizeof request);
  message.append(bytes);
  ssize_t n_sent = -1;
  while ((n_sent = ::send(socket, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT)) <
         0) {
    // Of a launcher that does not read.
    if (errno != EAGAIN || !wait_for(socket, POLLOUT, end)) break;
  }
  if (n_sent < 0 && errno == EAGAIN) throw_late();
  if (n_sent != static_cast<ssize_t>(message.size())) {
    throw SystemError(
        context, errno,
        fmt::format("cannot ask `lockstep run` for {} over descriptor {}, which this rank "
                    "inherited; close only descriptors that the program opened",
                    what, socket));
  }
  Answer answer;
  ssize_t n = 0;
  do {
    if (!wait_for(socket, POLLIN, end)) throw_late();
    answer.fd.reset();
    answer.bytes.resize(kAnswerBytes);
    n = base::receive_with_fd(socket, answer.bytes.data(), answer.bytes.size(), answer.fd);
    answer.head = {};
    if (n >= static_cast<ssize_t>(sizeof answer.head)) {
      std::memcpy(&answer.head, answer.bytes.data(), sizeof answer.head);
    }
    // An earlier request has ended by its limit before its answer came.
  } while (answer.head.request == kNextWorld && answer.head.number != request.number);
  const LauncherReply& head = answer.head;
  if (head.request != kNextWorld || head.n_lost > kMostLost || head.n_joined > kMostJoined ||
      static_cast<std::size_t>(n) != sizeof head + head.n_lost * sizeof(Lost) +
                                         head.n_joined * sizeof(std::int32_t) + head.n_bytes) {
    throw PeerLost(context, "`lockstep run`, which started this rank, is gone");
  }
  if (head.is_refused != 0 && head.error_number == ETIMEDOUT) {
    throw TimeoutError(context, std::string(base::text_in(head.text)));
  }
  if (head.is_refused != 0 && head.error_number == EOWNERDEAD) {
    ErrorContext of_rank = context;
    if (head.rank >= 0) of_rank.peers = {head.rank};
    throw PeerLost(std::move(of_rank), head.rank < 0 ? std::string(base::text_in(head.text))
                                                     : fmt::format("rank {} is gone: {}", head.rank,
                                                                   base::text_in(head.text)));
  }
  if (head.is_refused != 0 && head.error_number == 0) {
    throw EngineError(context,
                      fmt::format("`lockstep run` ends the job: {}", base::text_in(head.text)));
  }
  if (head.is_refused != 0) {
    throw SystemError(
        context, head.error_number,
        fmt::format("`lockstep run` cannot make {}: {}", what, base::text_in(head.text)));
  }
  if (!answer.fd && request.request != kStore) {
    throw SystemError(context, EMFILE,
                      fmt::format("no descriptor is left for the shared memory of {}; raise the "
                                  "limit on open files (ulimit -n)",
                                  what));
  }
  return answer;
}

}  // namespace

NextWorld request_next_world(int socket, int rank, std::int64_t last_generation, bool is_elastic,
                             const Call& barrier) {
  Request request{};
  request.request = kNextWorld;
  request.last_generation = last_generation;
  Answer answer = ask(socket, request, {}, is_elastic ? milliseconds::max() : barrier.timeout,
                      "another world", rank, barrier);
  NextWorld next;
  next.segment = std::move(answer.fd);
  const std::byte* rest = answer.bytes.data() + sizeof answer.head;
  next.rank = answer.head.rank;
  next.size = answer.head.size;
  next.world_rank = answer.head.world_rank;
  next.world_size = answer.head.world_size;
  next.generation = answer.head.generation;
  next.lost = read_list<Lost>(rest, answer.head.n_lost);
  next.joined = read_list<std::int32_t>(rest, answer.head.n_joined);
  return next;
}

Addresses exchange_addresses(int socket, int rank, int size, std::uint64_t world,
                             const std::string& own, const Call& barrier) {
  Request request{};
  request.request = kAddresses;
  request.world = world;
  // The launcher reports at the limit which ranks have not asked.
  const Answer answer = ask(socket, request, std::string_view(own).substr(0, kMaxAddressBytes),
                            barrier.timeout + base::patience::kLeadersReport,
                            "addresses of the other ranks", rank, barrier);
  AddressesHead head{};
  std::vector<AddressEntry> entries(static_cast<std::size_t>(size));
  const auto n_bytes = static_cast<ssize_t>(entries.size() * sizeof(AddressEntry));
  if (::pread(answer.fd.get(), &head, sizeof head, 0) != sizeof head ||
      head.n_ranks != entries.size() ||
      ::pread(answer.fd.get(), entries.data(), static_cast<std::size_t>(n_bytes), sizeof head) !=
          n_bytes) {
    throw EngineError(
        context_of(barrier, rank),
        fmt::format("`lockstep run` gave the addresses of {} ranks, but WORLD_SIZE is "
                    "{}; do not change the variables it sets",
                    head.n_ranks, size));
  }
  Addresses all{.n_cores = head.n_cores, .key = head.key};
  for (const AddressEntry& entry : entries) {
    all.by_rank.emplace_back(entry.bytes.data(),
                             std::min<std::size_t>(entry.n_bytes, kMaxAddressBytes));
    all.hosts.push_back(entry.host);
  }
  return all;
}

StoreAnswer ask_store(int socket, int rank, std::uint64_t world, const StoreRequest& request,
                      const Call& call) {
  const ErrorContext context = context_of(call, rank);
  const std::string bytes = bytes_of(request);
  if (bytes.size() > kMaxStoreBytes) {
    throw UsageError(context, fmt::format("the store of `lockstep run` takes {} KiB in a key and "
                                          "its value, and not {} bytes",
                                          kMaxStoreBytes >> 10U, bytes.size()));
  }
  Request head{};
  head.request = kStore;
  head.world = world;
  const Answer reply = ask(socket, head, bytes, call.timeout, "the store", rank, call);
  const auto* const first = reinterpret_cast<const char*>(reply.bytes.data()) + sizeof reply.head;
  const auto answer = read_store_answer({first, reply.head.n_bytes});
  if (!answer || answer->status == StoreAnswer::Status::invalid) {
    throw EngineError(context, "`lockstep run` does not understand the request to its store");
  }
  if (answer->status == StoreAnswer::Status::over) {
    throw PeerLost(context, "the generation of the world is over");
  }
  return *answer;
}

base::UniqueFd make_memory_of(const Addresses& addresses) {
  std::vector<AddressEntry> entries(addresses.by_rank.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string& address = addresses.by_rank[i];
    entries[i].n_bytes = static_cast<std::uint32_t>(std::min(address.size(), kMaxAddressBytes));
    entries[i].host = addresses.hosts[i];
    address.copy(entries[i].bytes.data(), kMaxAddressBytes);
  }
  const AddressesHead head{.n_ranks = static_cast<std::uint32_t>(entries.size()),
                           .key = addresses.key,
                           .n_cores = addresses.n_cores};
  base::UniqueFd memory(::memfd_create("lockstep addresses", MFD_CLOEXEC));
  const auto n_bytes = static_cast<ssize_t>(entries.size() * sizeof(AddressEntry));
  if (!memory || ::write(memory.get(), &head, sizeof head) != sizeof head ||
      ::write(memory.get(), entries.data(), static_cast<std::size_t>(n_bytes)) != n_bytes) {
    throw SystemError({.operation = "lockstep run"}, errno, "cannot keep the ranks' addresses");
  }
  return memory;
}

LauncherRequest receive_request(int socket) {
  using Kind = LauncherRequest::Kind;
  LauncherRequest newest{.kind = Kind::none};
  std::string message;
  while (true) {
    ssize_t n = ::recv(socket, nullptr, 0, MSG_DONTWAIT | MSG_PEEK | MSG_TRUNC);
    if (n > 0) {
      message.resize(std::min(static_cast<std::size_t>(n), sizeof(Request) + kMaxStoreBytes));
      n = ::recv(socket, message.data(), message.size(), MSG_DONTWAIT);
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return newest;
    if (n <= 0) return {.kind = Kind::closed};
    Request request{};
    if (message.size() < sizeof request) continue;
    std::memcpy(&request, message.data(), sizeof request);
    const Kind kind = request.request == kNextWorld   ? Kind::next_world
                      : request.request == kAddresses ? Kind::addresses
                      : request.request == kStore     ? Kind::store
                                                      : Kind::none;
    if (kind == Kind::none) continue;
    newest = {.kind = kind,
              .number = request.number,
              .limit = milliseconds(request.limit_ms),
              .last_generation = request.last_generation,
              .world = request.world,
              .bytes = message.substr(sizeof request)};
  }
}

void answer(int socket, std::uint64_t number, int segment, const NextWorld& next) noexcept try {
  LauncherReply given{
      .request = kNextWorld,
      .number = number,
      .is_refused = 0,
      .error_number = 0,
      .rank = next.rank,
      .size = next.size,
      .world_rank = next.world_rank,
      .world_size = next.world_size,
      .generation = next.generation,
      .n_lost = static_cast<std::uint32_t>(std::min(next.lost.size(), kMostLost)),
      .n_joined = static_cast<std::uint32_t>(std::min(next.joined.size(), kMostJoined)),
      .n_bytes = 0,
      .text = {}};
  std::vector<std::byte> bytes;
  append(bytes, &given, 1);
  append(bytes, next.lost.data(), given.n_lost);
  append(bytes, next.joined.data(), given.n_joined);
  base::send_with_fd(socket, bytes.data(), bytes.size(), segment);
} catch (const std::bad_alloc&) {
  refuse(socket, number, ENOMEM, "no memory for the answer");
}

void answer_addresses(int socket, std::uint64_t number, int memory) noexcept {
  LauncherReply given{};
  given.request = kNextWorld;
  given.number = number;
  base::send_with_fd(socket, &given, sizeof given, memory);
}

void answer_store(int socket, std::uint64_t number, std::string_view answer) noexcept try {
  LauncherReply given{};
  given.request = kNextWorld;
  given.number = number;
  given.n_bytes = static_cast<std::uint32_t>(answer.size());
  std::vector<std::byte> bytes;
  append(bytes, &given, 1);
  append(bytes, answer.data(), answer.size());
  // A rank that does not read its answers shall not stop the launcher.
  static_cast<void>(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
} catch (const std::bad_alloc&) {
  refuse(socket, number, ENOMEM, "no memory for the answer");
}

void refuse(int socket, std::uint64_t number, int error_number, std::string_view text,
            int rank) noexcept {
  LauncherReply given{};
  given.rank = rank;
  given.request = kNextWorld;
  given.number = number;
  given.is_refused = 1;
  given.error_number = error_number;
  base::copy_text(given.text, text);
  base::send_with_fd(socket, &given, sizeof given, /*fd=*/-1);
}

}  // namespace lockstep::shared
