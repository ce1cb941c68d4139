// The module of UCX: the functions of ucx_abi.hpp as calls of UCX's tagged messages. Loaded by
// ucx.cpp.
#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engines/message/without_throwing.hpp"
#include "engines/ucx/module/worker.hpp"
#include "engines/ucx/ucx_abi.hpp"

namespace lockstep::ucx_module {
namespace {

using message::Message;
using std::chrono::milliseconds;
using Direction = Message::Direction;

/// Longer messages are sent when their receiver permits it (rendezvous).
constexpr std::size_t kMaxEagerBytes = 64 << 10;
/// For requests of an exchange that failed.
constexpr milliseconds kMostToReceive{1000}, kMostToSend{100};
/// A rank waits so long for the others to take its last control messages.
constexpr milliseconds kMostToLeave{1000};
/// A control message is on its way within this time, if its peer makes progress. Otherwise every
/// wait goes on with it.
constexpr milliseconds kMostToSendControl{20};

constexpr std::string_view kWhyOver =
    "an exchange of this group ended in the middle of a message, so that it takes no other";

constexpr std::uint64_t tag_of(std::uint32_t key, std::uint32_t low) {
  return (std::uint64_t{key} << 32U) | low;
}
constexpr std::uint64_t kWholeTag = ~std::uint64_t{0};
constexpr std::uint64_t kKeyOfTag = tag_of(~std::uint32_t{0}, 0);
/// Of messages of the module's own: no group has these numbers. kLast: the sender sends no other.
/// kGreeting: see World::greet.
constexpr std::uint32_t kLast = 0, kGreeting = ~std::uint32_t{0};

ucp_request_param_t in_memory() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

/// Control messages that UCX may still read.
struct Sent {
  std::string bytes;
  void* request = nullptr;
};

bool is_done(void* request) { return ucp_request_check_status(request) != UCS_INPROGRESS; }

/// The control messages of all groups of a world. Their tag is the group's number, and the sender.
struct World {
  std::list<Sent> sent{};  // the worker reads them until its end
  std::unique_ptr<Worker> worker{};
  std::uint32_t rank = 0;
  std::uint32_t key = 0;
  std::atomic<bool> is_sending{false};
  std::vector<bool> has_greeted{};  ///< by rank
  std::vector<bool> has_met{};      ///< whose greeting has come

  World() = default;
  ~World() { say_last(); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  /// Waits until the peers have received everything: if a socket is closed that holds what was not
  /// read, the peer may lose what it has not read either.
  void say_last();
  int send(std::size_t to, std::uint32_t number, std::string bytes);
  /// Connects to a rank, which answers in its next wait: from then on a control message reaches it
  /// without further progress by this rank.
  int greet(std::size_t to);
  unsigned progress();
  /// Whether one has arrived, which is copied, up to n_bytes of it.
  bool receive(std::uint64_t tag, std::uint64_t mask, void* bytes, std::size_t n_bytes,
               std::uint32_t* sender);
  void forget_sent() {
    sent.remove_if([](const Sent& one) {
      if (one.request != nullptr && !is_done(one.request)) return false;
      if (one.request != nullptr) ucp_request_free(one.request);
      return true;
    });
  }
};

struct Group {
  std::shared_ptr<World> world;
  std::unique_ptr<Worker> worker;
  std::vector<std::int32_t> ranks;  ///< of the world, by rank
  std::uint32_t rank;
  std::uint32_t number;
  std::span<const Message> messages{};  ///< of the current exchange
  std::vector<void*> requests{};        ///< by message; null: complete
  std::size_t first_pending = 0;
  std::int32_t failed_peer = -1;
  bool has_new_peers = false;  ///< whose greetings this exchange awaits

  int start(std::size_t i);
  int collect(std::int32_t* all_done);
  int meet_new_peers(std::int32_t* all_done);
  std::size_t rank_of(std::int32_t peer) const {
    return static_cast<std::size_t>(ranks[static_cast<std::size_t>(peer)]);
  }
};

Group& group_of(void* handle) { return *static_cast<Group*>(handle); }
Worker& worker_of(void* handle) { return *static_cast<Worker*>(handle); }

int World::send(std::size_t to, std::uint32_t number, std::string bytes) {
  forget_sent();
  Worker::Peer* peer = nullptr;
  if (const int code = worker->connect(to, peer); code != 0) return code;
  Sent& last = sent.emplace_back(Sent{.bytes = std::move(bytes)});
  const ucp_request_param_t param = in_memory();
  void* const request = ucp_tag_send_nbx(peer->endpoint, last.bytes.data(), last.bytes.size(),
                                         tag_of(number, rank), &param);
  if (UCS_PTR_IS_ERR(request)) {
    sent.pop_back();
    return -UCS_PTR_STATUS(request);
  }
  last.request = request;
  progress_until(
      kMostToSendControl, [this] { return worker->progress(); },
      [request] { return request == nullptr || is_done(request); });
  forget_sent();
  is_sending = !sent.empty();
  return 0;
}

int World::greet(std::size_t to) {
  if (has_greeted[to]) return 0;
  const int code = send(to, kGreeting, "here");
  has_greeted[to] = code == 0;
  return code;
}

unsigned World::progress() {
  const unsigned n = worker->progress();
  if (is_sending) {
    forget_sent();
    is_sending = !sent.empty();
  }
  std::array<char, 8> ignored{};
  std::uint32_t sender = 0;
  while (receive(tag_of(kGreeting, 0), kKeyOfTag, ignored.data(), ignored.size(), &sender)) {
    if (sender >= has_met.size()) continue;
    has_met[sender] = true;
    greet(sender);
  }
  return n;
}

bool World::receive(std::uint64_t tag, std::uint64_t mask, void* bytes, std::size_t n_bytes,
                    std::uint32_t* sender) {
  ucp_tag_recv_info_t info{};
  const ucp_tag_message_h arrived = ucp_tag_probe_nb(worker->get(), tag, mask, /*remove=*/1, &info);
  if (arrived == nullptr) return false;
  std::vector<char> whole(info.length);
  const ucp_request_param_t param = in_memory();
  void* const request =
      ucp_tag_msg_recv_nbx(worker->get(), whole.data(), whole.size(), arrived, &param);
  if (UCS_PTR_IS_ERR(request)) return false;
  if (request != nullptr) {
    const bool has_all = progress_until(
        kMostToReceive, [this] { return worker->progress(); }, [&] { return is_done(request); });
    if (!has_all) {
      static_cast<void>(new std::vector<char>(std::move(whole)));  // UCX may still write to it
      return false;
    }
    const bool is_whole = ucp_request_check_status(request) == UCS_OK;
    ucp_request_free(request);
    if (!is_whole) return false;
  }
  std::memcpy(bytes, whole.data(), std::min(n_bytes, whole.size()));
  if (sender != nullptr) *sender = static_cast<std::uint32_t>(info.sender_tag);
  return true;
}

void World::say_last() {
  if (!is_own_process()) return;
  const std::lock_guard lock(worker->mutex);
  std::vector<bool> is_expected(worker->n_peers());
  for (std::size_t i = 0; i < worker->n_peers(); ++i) {
    const Worker::Peer& peer = worker->peer(i);
    is_expected[i] = peer.endpoint != nullptr && peer.status == UCS_OK;
    if (is_expected[i]) send(i, kLast, "last");
  }
  progress_until(
      kMostToLeave, [this] { return worker->progress(); },
      [&] {
        std::array<char, 8> ignored{};
        std::uint32_t sender = 0;
        while (receive(tag_of(kLast, 0), kKeyOfTag, ignored.data(), ignored.size(), &sender)) {
          if (sender < is_expected.size()) is_expected[sender] = false;
        }
        forget_sent();
        for (std::size_t i = 0; i < is_expected.size(); ++i) {
          if (is_expected[i] && worker->peer(i).status == UCS_OK) return false;
        }
        return true;
      });
}

// --- exchanges

int Group::start(std::size_t i) {
  const Message& message = messages[i];
  const auto to = static_cast<std::size_t>(message.peer);
  failed_peer = message.peer;
  // Also to receive: the endpoint says if its peer is gone.
  Worker::Peer* peer = nullptr;
  const bool sends = message.direction == Direction::send;
  const int connected = worker->connect(to, peer);
  // What a peer sent before it left may be here already: collect() looks at its status.
  if (connected != 0 && (sends || peer->endpoint == nullptr)) return connected;
  if (connected == 0) {
    const std::lock_guard lock(world->worker->mutex);
    if (const int code = world->greet(rank_of(message.peer)); code != 0) return code;
    has_new_peers = has_new_peers || !world->has_met[rank_of(message.peer)];
  }
  const ucp_request_param_t param = in_memory();
  void* const request =
      message.direction == Direction::send
          ? ucp_tag_send_nbx(peer->endpoint, message.data, message.n_bytes,
                             tag_of(world->key, rank), &param)
          : ucp_tag_recv_nbx(worker->get(), message.data, message.n_bytes,
                             tag_of(world->key, static_cast<std::uint32_t>(message.peer)),
                             kWholeTag, &param);
  if (UCS_PTR_IS_ERR(request)) return -UCS_PTR_STATUS(request);
  requests[i] = request;
  failed_peer = -1;
  return 0;
}

int begin(void* handle, const Message* messages, std::size_t n_messages, void** exchange) {
  Group& group = group_of(handle);
  *exchange = handle;
  const std::lock_guard lock(group.worker->mutex);
  group.messages = {messages, n_messages};
  group.requests.assign(n_messages, nullptr);
  group.first_pending = 0;
  group.failed_peer = -1;
  group.has_new_peers = false;
  if (group.worker->is_stuck) return kGroupIsOver;
  // Short messages: receives first, because a message whose receive is posted before it arrives is
  // copied once less. Long ones: sends first, as over MPI: see mpi_exchange.cpp.
  const bool is_long = std::ranges::any_of(
      group.messages, [](const Message& message) { return message.n_bytes > kMaxEagerBytes; });
  for (const bool sends : {is_long, !is_long}) {
    for (std::size_t i = 0; i < n_messages; ++i) {
      if ((messages[i].direction == Direction::send) != sends) continue;
      if (const int code = group.start(i); code != 0) return code;
    }
  }
  return 0;
}

/// Frees the requests that are complete.
int Group::collect(std::int32_t* all_done) {
  for (; first_pending < requests.size(); ++first_pending) {
    void*& request = requests[first_pending];
    if (request == nullptr) continue;
    const ucs_status_t status = ucp_request_check_status(request);
    if (status == UCS_INPROGRESS) break;
    ucp_request_free(std::exchange(request, nullptr));
    if (status == UCS_OK) continue;
    failed_peer = messages[first_pending].peer;
    return -status;
  }
  *all_done = first_pending == requests.size() ? 1 : 0;
  // UCX does not end the receives from a peer that is gone.
  for (std::size_t i = first_pending; i < requests.size(); ++i) {
    const auto& peer = worker->peer(static_cast<std::size_t>(messages[i].peer));
    if (requests[i] == nullptr) continue;
    const ucs_status_t status = ucp_request_check_status(requests[i]);
    if (status == UCS_OK || (status == UCS_INPROGRESS && peer.status == UCS_OK)) continue;
    failed_peer = messages[i].peer;
    return status == UCS_INPROGRESS ? -peer.status : -status;
  }
  return 0;
}

/// Both ends of a message meet, so that no rank waits for one that does not look.
int Group::meet_new_peers(std::int32_t* all_done) {
  const std::lock_guard lock(world->worker->mutex);
  world->progress();
  has_new_peers = false;
  for (const Message& message : messages) {
    const std::size_t rank_in_world = rank_of(message.peer);
    if (world->has_met[rank_in_world]) continue;
    has_new_peers = true;
    *all_done = 0;
    const Worker::Peer& peer = world->worker->peer(rank_in_world);
    if (peer.status == UCS_OK) continue;
    failed_peer = message.peer;
    return -peer.status;
  }
  return 0;
}

int test(void* exchange, std::size_t n_tests, std::int32_t* all_done) {
  Group& group = group_of(exchange);
  const std::lock_guard lock(group.worker->mutex);
  *all_done = 0;
  if (group.worker->is_stuck) return kGroupIsOver;
  for (std::size_t i = 0; i < n_tests && *all_done == 0; ++i) {
    group.worker->progress();
    if (const int code = group.collect(all_done); code != 0) return code;
    if (!group.has_new_peers) {
      if (!group.world->is_sending) continue;
      const std::lock_guard world_lock(group.world->worker->mutex);
      group.world->progress();
      continue;
    }
    if (const int code = group.meet_new_peers(all_done); code != 0) return code;
  }
  return 0;
}

int awaited(void* exchange, std::int32_t* ranks, std::size_t* n_ranks) {
  Group& group = group_of(exchange);
  const std::lock_guard lock(group.worker->mutex);
  *n_ranks = 0;
  const std::lock_guard world_lock(group.world->worker->mutex);
  for (std::size_t i = 0; i < group.requests.size(); ++i) {
    const std::int32_t peer = group.messages[i].peer;
    const bool is_complete = group.requests[i] == nullptr || is_done(group.requests[i]);
    if (is_complete && group.world->has_met[group.rank_of(peer)]) continue;
    if (*n_ranks == 0 || ranks[*n_ranks - 1] != peer) ranks[(*n_ranks)++] = peer;
  }
  return 0;
}

/// Allocates nothing: the call that it ends may have run out of memory.
void finish(void* exchange) {
  Group& group = group_of(exchange);
  if (!is_own_process()) return;
  const std::lock_guard lock(group.worker->mutex);
  if (group.worker->is_stuck) return;
  const auto is_pending = [&](std::size_t i) {
    return group.requests[i] != nullptr && !is_done(group.requests[i]);
  };
  for (std::size_t i = 0; i < group.requests.size(); ++i) {
    if (is_pending(i) && group.messages[i].direction == Direction::receive) {
      ucp_request_cancel(group.worker->get(), group.requests[i]);
    }
  }
  const auto are_over = [&](Direction direction) {
    for (std::size_t i = 0; i < group.requests.size(); ++i) {
      if (group.messages[i].direction == direction && is_pending(i)) return false;
    }
    return true;
  };
  const auto progress = [&] { return group.worker->progress(); };
  const bool has_received =
      progress_until(kMostToReceive, progress, [&] { return are_over(Direction::receive); });
  const bool has_sent =
      progress_until(kMostToSend, progress, [&] { return are_over(Direction::send); });
  // A message whose peer is stopped in the middle cannot be cancelled. It moves only when its
  // worker makes progress, which this one does not any more.
  group.worker->is_stuck = !has_received || !has_sent;
  for (void*& request : group.requests) {
    if (request != nullptr && is_done(request)) ucp_request_free(std::exchange(request, nullptr));
  }
}

std::int32_t failed_peer(void* handle) {
  Group& group = group_of(handle);
  const std::lock_guard lock(group.worker->mutex);
  return group.failed_peer;
}

// --- control messages

int send_control(void* handle, int rank, const void* message, std::size_t n_bytes) {
  if (!is_own_process()) return 0;
  Group& group = group_of(handle);
  const std::lock_guard lock(group.world->worker->mutex);
  return group.world->send(group.rank_of(rank), group.number,
                           std::string(static_cast<const char*>(message), n_bytes));
}

int poll_control(void* handle, void* message, std::size_t n_bytes, std::int32_t* has_arrived) {
  *has_arrived = 0;
  if (!is_own_process()) return 0;
  Group& group = group_of(handle);
  World& world = *group.world;
  const std::lock_guard lock(world.worker->mutex);
  world.progress();
  *has_arrived =
      world.receive(tag_of(group.number, 0), kKeyOfTag, message, n_bytes, nullptr) ? 1 : 0;
  return 0;
}

// --- groups

const char* library() {
  static const std::string text = std::string("UCX ") + ucp_get_version_string();
  return text.c_str();
}

void error_text(int code, char* text, std::size_t n_bytes) {
  const std::string_view whole =
      code == kGroupIsOver ? kWhyOver : ucs_status_string(static_cast<ucs_status_t>(-code));
  text[whole.copy(text, n_bytes - 1)] = '\0';
}

int open(void** handle) {
  std::unique_ptr<Worker> worker;
  const int code = Worker::make(worker);
  *handle = worker.release();
  return code;
}

void close(void* handle) { delete &worker_of(handle); }

int address(void* handle, LockstepUcxAddress* address) {
  Worker& worker = worker_of(handle);
  const std::lock_guard lock(worker.mutex);
  return worker.address(*address);
}

int world(void* data, void* control, const LockstepUcxAddress* data_addresses,
          const LockstepUcxAddress* control_addresses, std::size_t n_ranks, std::int32_t rank,
          std::uint32_t key, std::int32_t number, void** result) {
  worker_of(data).set_peers(data_addresses, n_ranks);
  worker_of(control).set_peers(control_addresses, n_ranks);
  auto group = std::make_unique<Group>();
  for (std::size_t i = 0; i < n_ranks; ++i) group->ranks.push_back(static_cast<std::int32_t>(i));
  group->rank = static_cast<std::uint32_t>(rank);
  group->number = static_cast<std::uint32_t>(number);
  group->world = std::make_shared<World>();
  group->world->rank = group->rank;
  group->world->key = key;
  group->world->has_greeted.resize(n_ranks);
  group->world->has_met.resize(n_ranks);
  group->world->worker.reset(&worker_of(control));
  group->worker.reset(&worker_of(data));
  *result = group.release();
  return 0;
}

int part(void* handle, void* data, const LockstepUcxAddress* addresses, const std::int32_t* ranks,
         std::size_t n_ranks, std::int32_t rank, std::int32_t number, void** result) {
  worker_of(data).set_peers(addresses, n_ranks);
  const Group& whole = group_of(handle);
  auto group = std::make_unique<Group>();
  for (std::size_t i = 0; i < n_ranks; ++i) {
    group->ranks.push_back(whole.ranks[static_cast<std::size_t>(ranks[i])]);
  }
  group->rank = static_cast<std::uint32_t>(rank);
  group->number = static_cast<std::uint32_t>(number);
  group->world = whole.world;
  group->worker.reset(&worker_of(data));
  *result = group.release();
  return 0;
}

void release(void* handle) {
  std::unique_ptr<Group> group(&group_of(handle));
  if (is_own_process()) return;
  static_cast<void>(group.release());  // it is that of the process that this is a fork of
}

template <auto kFunction>
using WithoutThrowing = message::WithoutThrowing<kFunction, kOutOfMemory>;

constexpr LockstepUcx kModule = {.version = kLockstepUcxVersion,
                                 .transport = {.library = library,
                                               .error_text = error_text,
                                               .release = release,
                                               .begin = WithoutThrowing<begin>::call,
                                               .prepare = nullptr,
                                               .test = test,
                                               .awaited = awaited,
                                               .finish = finish,
                                               .send_control = WithoutThrowing<send_control>::call,
                                               .poll_control = WithoutThrowing<poll_control>::call},
                                 .start = start,
                                 .open = WithoutThrowing<open>::call,
                                 .close = close,
                                 .address = address,
                                 .world = WithoutThrowing<world>::call,
                                 .part = WithoutThrowing<part>::call,
                                 .failed_peer = failed_peer};

}  // namespace
}  // namespace lockstep::ucx_module

extern "C" __attribute__((visibility("default"))) const LockstepUcx* lockstep_ucx() {
  return &lockstep::ucx_module::kModule;
}
