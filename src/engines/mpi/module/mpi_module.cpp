// The module of one MPI: the functions of abi.hpp as calls of that MPI. Compiled once for each
// installed MPI, and loaded by mpi.cpp.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engines/message/without_throwing.hpp"
#include "engines/mpi/module/mpi_exchange.hpp"
#include "engines/mpi/mpi_abi.hpp"

namespace lockstep::mpi_module {
namespace {

using message::Message;

/// After a failure the ranks call MPI_Finalize at about the same time, or never.
constexpr double kMaxSecondsToFinalize = 2.0;
constexpr double kMaxSecondsToLeave = 2.0;

// If MPI grants less than MPI_THREAD_MULTIPLE, one mutex serialises all calls. Each holds it
// briefly, except world().
std::recursive_mutex mutex;
bool needs_lock = true;
int granted_level = MPI_THREAD_SINGLE;
std::atomic<bool> is_ours{false};  // initialized here, so finalized here
std::atomic<bool> has_given_up{false};
/// An exchange ended in the middle of a message: MPI would write the rest into memory that has been
/// reused. Transports that copy do so only inside MPI's functions, so the module no longer calls
/// any of them.
std::atomic<bool> must_not_call{false};
constexpr int kMustNotCall = -1;  // no error code of MPI's is negative
constexpr std::string_view kWhyNot =
    "an exchange ended in the middle of a message that MPI cannot cancel; MPI would write it "
    "to memory that has been reused, so this process can no longer use MPI";
pid_t pid = 0;

std::atomic<int> n_inside{0};

/// Holds the mutex, if one is needed, during a call of the module.
class Entry {
 public:
  Entry() {
    if (needs_lock) lock_ = std::unique_lock(mutex);
    n_inside.fetch_add(1);  // before must_not_call is read
  }
  ~Entry() { n_inside.fetch_sub(1); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

/// Control messages that MPI may still read: no call waits until they are sent.
struct Sent {
  std::vector<char> bytes;
  MPI_Request request;
};

/// A communicator over all ranks, never freed: control messages of peers may still be in transit,
/// and MPI reuses the context id of a freed one.
struct World {
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<int> control_tags;  // of all groups that there have been
  std::list<Sent> sent;           // by groups that were released since
};

struct Group {
  World& world;
  Route route;          ///< of the data; control messages have the tag behind it
  Exchange exchange{};  ///< the current one; its capacity is reused
  Exchange prepared{};
  std::list<Sent> sent{};
  std::mutex sent_mutex{};  // any thread sends control messages

  int control_tag() const { return route.tag + 1; }
};

Group& group_of(void* handle) { return *static_cast<Group*>(handle); }

// Never destroyed: a program's globals may hold groups.
std::mutex& groups_mutex = *new std::mutex;  // guards what follows, and what worlds have of groups
auto& worlds = *new std::list<World>;
auto& groups = *new std::vector<Group*>;  // all that are not released

/// At its end MPI reports messages that were not received.
void receive_control_messages(MPI_Comm comm, int tag) {
  std::array<char, 4096> message{};  // longer than any
  for (;;) {
    int flag = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, tag, comm, &flag, &status);
    if (flag == 0) return;
    MPI_Recv(message.data(), message.size(), MPI_BYTE, status.MPI_SOURCE, tag, comm,
             MPI_STATUS_IGNORE);
  }
}

/// MPI_Finalize, also when the program calls it, first deletes the attributes of MPI_COMM_SELF, and
/// so calls this.
int at_finalize(MPI_Comm, int, void*, void*) {
  // After this barrier all ranks have sent their control messages. It has a time limit because
  // after a failure, which some ranks may not know of yet, a rank may never call MPI_Finalize.
  MPI_Request barrier = MPI_REQUEST_NULL;
  int is_done = 0;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) == MPI_SUCCESS) {
    const double give_up = MPI_Wtime() + kMaxSecondsToFinalize;
    while (MPI_Test(&barrier, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_done == 0 &&
           MPI_Wtime() < give_up) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  const std::lock_guard lock(groups_mutex);
  for (const World& world : worlds) {
    for (const int tag : world.control_tags) receive_control_messages(world.comm, tag);
  }
  for (Group* group : groups) free_prepared(group->prepared);
  return MPI_SUCCESS;
}

void finalize() {
  int is_over = 0;
  MPI_Finalized(&is_over);
  // A fork of the process is not a rank.
  if (is_ours && !has_given_up && is_over == 0 && ::getpid() == pid) MPI_Finalize();
}

const char* library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  if (char* const end = std::strchr(text, '\n')) *end = '\0';
  return text;
}

void error_text(int code, char* text, std::size_t n_bytes) {
  if (code == kMustNotCall) {
    text[kWhyNot.copy(text, n_bytes - 1)] = '\0';
    return;
  }
  char whole[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, whole, &length) != MPI_SUCCESS) length = 0;
  const std::size_t n = std::min(n_bytes - 1, static_cast<std::size_t>(length));
  std::memcpy(text, whole, n);
  text[n] = '\0';
}

int start(int* rank, int* n_ranks) {
  int is_running = 0;
  int code = MPI_Initialized(&is_running);
  if (code != MPI_SUCCESS) return code;
  if (is_running == 0) {
    code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &granted_level);
    if (code != MPI_SUCCESS) return code;
    is_ours = true;
    std::atexit(finalize);
  } else {
    code = MPI_Query_thread(&granted_level);
    if (code != MPI_SUCCESS) return code;
  }
  needs_lock = granted_level < MPI_THREAD_MULTIPLE;
  if (pid == 0) {
    pid = ::getpid();
    int key = MPI_KEYVAL_INVALID;
    code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_finalize, &key, nullptr);
    if (code == MPI_SUCCESS) code = MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
    if (code != MPI_SUCCESS) return code;
  }
  code = MPI_Comm_rank(MPI_COMM_WORLD, rank);
  return code != MPI_SUCCESS ? code : MPI_Comm_size(MPI_COMM_WORLD, n_ranks);
}

const char* one_thread(std::int32_t* is_this) {
  if (granted_level >= MPI_THREAD_SERIALIZED) return nullptr;
  int is_main = 0;
  *is_this = MPI_Is_thread_main(&is_main) == MPI_SUCCESS && is_main != 0 ? 1 : 0;
  return granted_level == MPI_THREAD_SINGLE ? "MPI_THREAD_SINGLE" : "MPI_THREAD_FUNNELED";
}

int host_ranks(std::uint64_t* mask, std::size_t n_words, int* n_ranks) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  MPI_Comm host = MPI_COMM_NULL;
  int code = MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  if (code != MPI_SUCCESS) return code;
  code = MPI_Comm_size(host, n_ranks);
  if (code == MPI_SUCCESS) {
    code =
        MPI_Allreduce(MPI_IN_PLACE, mask, static_cast<int>(n_words), MPI_UINT64_T, MPI_BOR, host);
  }
  MPI_Comm_free(&host);
  return code;
}

void skip_finalize() { has_given_up = true; }

/// The tags of a group: of its data, and the next one.
constexpr int tag_of(std::int32_t number) { return 2 * number; }
constexpr int kMinLastTag = 32767;  // by the standard

void* make_group(World& world, std::vector<std::int32_t> ranks, std::int32_t number) {
  auto group = std::make_unique<Group>(world, Route{world.comm, tag_of(number), std::move(ranks)});
  const std::lock_guard lock(groups_mutex);
  world.control_tags.push_back(group->control_tag());
  groups.push_back(group.get());
  return group.release();
}

int world(std::int32_t number, void** handle, std::int32_t* last_number) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  MPI_Comm comm = MPI_COMM_NULL;
  int code = MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  if (code != MPI_SUCCESS) return code;
  code = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  if (code != MPI_SUCCESS) return code;
  int n_ranks = 0;
  code = MPI_Comm_size(comm, &n_ranks);
  if (code != MPI_SUCCESS) return code;
  const int* last_tag = nullptr;
  int is_set = 0;
  code = MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&last_tag), &is_set);
  if (code != MPI_SUCCESS) return code;
  *last_number = ((is_set != 0 ? *last_tag : kMinLastTag) - 1) / 2;
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(n_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  World& made = []() -> World& {
    const std::lock_guard lock(groups_mutex);
    return worlds.emplace_back();
  }();
  made.comm = comm;
  *handle = make_group(made, std::move(ranks), number);
  return MPI_SUCCESS;
}

int part(void* handle, const std::int32_t* ranks, std::size_t n_ranks, std::int32_t number,
         void** result) {
  const Group& whole = group_of(handle);
  std::vector<std::int32_t> of_world;
  for (std::size_t i = 0; i < n_ranks; ++i) of_world.push_back(whole.route.rank_of(ranks[i]));
  *result = make_group(whole.world, std::move(of_world), number);
  return MPI_SUCCESS;
}

void release(void* handle) {
  const Entry entry;
  const std::unique_ptr<Group> group(&group_of(handle));
  int is_over = 0;
  MPI_Finalized(&is_over);
  // A fork of the process would receive the rank's messages.
  if (is_over == 0 && !must_not_call && ::getpid() == pid) {
    free_prepared(group->prepared);
    receive_control_messages(group->route.comm, group->control_tag());
  }
  const std::lock_guard lock(groups_mutex);
  std::erase(groups, group.get());
  group->world.sent.splice(group->world.sent.end(), group->sent);
}

Exchange& exchange_of(void* handle) { return *static_cast<Exchange*>(handle); }

int prepare(void* handle, const Message* messages, std::size_t n_messages) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  Group& group = group_of(handle);
  return prepare(group.prepared, group.route, {messages, n_messages});
}

int begin(void* handle, const Message* messages, std::size_t n_messages, void** result) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  Group& group = group_of(handle);
  if (group.prepared.is_prepared && messages == group.prepared.messages.data()) {
    *result = &group.prepared;
    return begin_prepared(group.prepared, group.route);
  }
  *result = &group.exchange;
  return begin(group.exchange, group.route, {messages, n_messages});
}

int test(void* exchange, std::size_t n_tests, std::int32_t* all_done) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  return test(exchange_of(exchange), n_tests, all_done);
}

int awaited(void* exchange, std::int32_t* ranks, std::size_t* n_ranks) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  return awaited(exchange_of(exchange), ranks, n_ranks);
}

void finish(void* exchange) {
  {
    const Entry entry;
    if (must_not_call || finish(exchange_of(exchange))) return;
    must_not_call = true;
    has_given_up = true;
  }
  // Other threads that have not seen it are inside MPI for microseconds, except in its collectives
  // (when a world is created), which take as long as the slowest peer.
  const double give_up = MPI_Wtime() + kMaxSecondsToLeave;
  while (n_inside > 0 && MPI_Wtime() < give_up) std::this_thread::yield();
}

int send_control(void* handle, int rank, const void* message, std::size_t n_bytes) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  int is_over = 0;
  MPI_Finalized(&is_over);
  if (is_over != 0) return MPI_SUCCESS;  // the program has finalized MPI
  Group& group = group_of(handle);
  const char* const bytes = static_cast<const char*>(message);
  const std::lock_guard lock(group.sent_mutex);
  group.sent.remove_if([](Sent& sent) {
    int is_done = 0;
    return MPI_Test(&sent.request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_done != 0;
  });
  group.sent.push_back({{bytes, bytes + n_bytes}, MPI_REQUEST_NULL});
  Sent& last = group.sent.back();
  return MPI_Isend(last.bytes.data(), static_cast<int>(n_bytes), MPI_BYTE,
                   group.route.rank_of(rank), group.control_tag(), group.route.comm, &last.request);
}

int poll_control(void* handle, void* message, std::size_t n_bytes, std::int32_t* has_arrived) {
  const Entry entry;
  if (must_not_call) return kMustNotCall;
  MPI_Status status;
  int flag = 0;
  const Group& group = group_of(handle);
  const int tag = group.control_tag();
  const int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, group.route.comm, &flag, &status);
  *has_arrived = flag;
  if (code != MPI_SUCCESS || flag == 0) return code;
  return MPI_Recv(message, static_cast<int>(n_bytes), MPI_BYTE, status.MPI_SOURCE, tag,
                  group.route.comm, MPI_STATUS_IGNORE);
}

template <auto kFunction>
using WithoutThrowing = message::WithoutThrowing<kFunction, MPI_ERR_NO_MEM>;

constexpr int (*kBegin)(void*, const Message*, std::size_t, void**) = begin;
constexpr int (*kPrepare)(void*, const Message*, std::size_t) = prepare;

constexpr LockstepMpi kModule = {.version = kLockstepMpiVersion,
                                 .transport = {.library = library,
                                               .error_text = error_text,
                                               .release = release,
                                               .begin = WithoutThrowing<kBegin>::call,
                                               .prepare = WithoutThrowing<kPrepare>::call,
                                               .test = test,
                                               .awaited = awaited,
                                               .finish = finish,
                                               .send_control = WithoutThrowing<send_control>::call,
                                               .poll_control = poll_control},
                                 .start = start,
                                 .one_thread = one_thread,
                                 .host_ranks = host_ranks,
                                 .skip_finalize = skip_finalize,
                                 .world = WithoutThrowing<world>::call,
                                 .part = WithoutThrowing<part>::call};

}  // namespace
}  // namespace lockstep::mpi_module

extern "C" __attribute__((visibility("default"))) const LockstepMpi* lockstep_mpi() {
  return &lockstep::mpi_module::kModule;
}
