// The module of one MPI: lockstep's few needs in that MPI's calls. Compiled once for each MPI that
// is installed, and loaded by mpi.cpp.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "engines/mpi/abi.hpp"

namespace {

constexpr int kDataTag = 1;
constexpr int kControlTag = 2;
/// MPI counts with an int. Longer messages travel in pieces, which stay in order.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;
/// For requests of an exchange that failed.
constexpr double kMostSecondsToReceive = 1.0, kMostSecondsToSend = 0.1;
/// Ranks that fail come to MPI_Finalize about together, or never.
constexpr double kMostSecondsToFinalize = 2.0;

// Where MPI grants less than MPI_THREAD_MULTIPLE, all calls pass one lock: each for a moment or for
// the few looks of one test(), but for those that make a communicator, which wait for its other
// members. There, two threads may not split two groups at the same time.
std::recursive_mutex mutex;
bool needs_lock = true;
std::atomic<bool> is_ours{false};  // MPI, to finalize
std::atomic<bool> has_given_up{false};
pid_t pid = 0;

class Entry {
 public:
  Entry() {
    if (needs_lock) lock_ = std::unique_lock(mutex);
  }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

using lockstep::message::Message;

struct Exchange {
  std::span<const Message> messages;
  std::vector<MPI_Request> requests;  ///< receives, then sends, both in the order of the messages
  std::size_t n_receives = 0;
  bool is_prepared = false;  ///< the receives are persistent
};

struct Communicator {
  MPI_Comm comm = MPI_COMM_NULL;
  bool is_world = false;
  Exchange exchange;  ///< kept for its room
  Exchange prepared;
  /// Control messages in transit: MPI reads them until they are sent, which nobody waits for.
  struct ControlMessage {
    std::vector<char> bytes;
    MPI_Request request;
  };
  std::list<ControlMessage> control_messages;
  std::mutex control_mutex;  // any thread sends them
};

Communicator& communicator(void* handle) { return *static_cast<Communicator*>(handle); }

/// All that are not freed, and their lock.
std::mutex communicators_mutex;
std::vector<Communicator*> communicators;

void free_prepared(Exchange& exchange);

/// MPI reports messages that were not received.
void receive_control_messages() {
  const std::lock_guard lock(communicators_mutex);
  std::vector<char> message;
  for (const Communicator* kept : communicators) {
    for (;;) {
      int flag = 0;
      int n_bytes = 0;
      MPI_Status status;
      MPI_Iprobe(MPI_ANY_SOURCE, kControlTag, kept->comm, &flag, &status);
      if (flag == 0) break;
      MPI_Get_count(&status, MPI_BYTE, &n_bytes);
      message.resize(static_cast<std::size_t>(n_bytes));
      MPI_Recv(message.data(), n_bytes, MPI_BYTE, status.MPI_SOURCE, kControlTag, kept->comm,
               MPI_STATUS_IGNORE);
    }
  }
}

/// MPI_Finalize's first act, whoever calls it, is to free the attributes of MPI_COMM_SELF.
int at_finalize(MPI_Comm, int, void*, void*) {
  // As MPI_Finalize would: then all have sent their control messages. Also after a failure, which
  // some ranks may not know of yet; but one may never come.
  MPI_Request barrier = MPI_REQUEST_NULL;
  int is_done = 0;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &barrier) == MPI_SUCCESS) {
    const double give_up = MPI_Wtime() + kMostSecondsToFinalize;
    while (MPI_Test(&barrier, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_done == 0 &&
           MPI_Wtime() < give_up) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  receive_control_messages();
  for (Communicator* kept : communicators) free_prepared(kept->prepared);
  return MPI_SUCCESS;
}

void finalize() {
  int is_over = 0;
  MPI_Finalized(&is_over);
  // A copy of the process has no part in MPI.
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
  char whole[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, whole, &length) != MPI_SUCCESS) length = 0;
  const std::size_t n = std::min(n_bytes - 1, static_cast<std::size_t>(length));
  std::memcpy(text, whole, n);
  text[n] = '\0';
}

int start(int* rank, int* n_ranks) {
  int is_running = 0;
  int granted = MPI_THREAD_SINGLE;
  int code = MPI_Initialized(&is_running);
  if (code != MPI_SUCCESS) return code;
  if (is_running == 0) {
    code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &granted);
    if (code != MPI_SUCCESS) return code;
    is_ours = true;
    std::atexit(finalize);
  } else {
    code = MPI_Query_thread(&granted);
    if (code != MPI_SUCCESS) return code;
  }
  needs_lock = granted < MPI_THREAD_MULTIPLE;
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

int neighbours(std::uint64_t* mask, std::size_t n_words, int* n_ranks) {
  const Entry entry;
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

void give_up_finalize() { has_given_up = true; }

int keep(MPI_Comm comm, void** handle) {
  auto kept = std::make_unique<Communicator>();
  kept->comm = comm;
  *handle = kept.get();
  {
    const std::lock_guard lock(communicators_mutex);
    communicators.push_back(kept.release());
  }
  return MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
}

int world(void** handle) {
  const Entry entry;
  MPI_Comm comm = MPI_COMM_NULL;
  int code = MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  if (code != MPI_SUCCESS) return code;
  code = keep(comm, handle);
  communicator(*handle).is_world = true;
  return code;
}

int split(void* handle, int color, int key, void** result) {
  const Entry entry;
  MPI_Comm comm = MPI_COMM_NULL;
  const int code = MPI_Comm_split(communicator(handle).comm, color, key, &comm);
  return code != MPI_SUCCESS ? code : keep(comm, result);
}

/// Frees a group's communicator. The world's stays: its peers' control messages may still be in
/// transit, and MPI gives a freed communicator's place to the next.
void release(void* handle) {
  const Entry entry;
  Communicator& kept = communicator(handle);
  int is_over = 0;
  MPI_Finalized(&is_over);
  {
    const std::lock_guard lock(kept.control_mutex);
    if (kept.is_world || !kept.control_messages.empty() || is_over != 0) return;
  }
  {
    const std::lock_guard lock(communicators_mutex);
    std::erase(communicators, &kept);
  }
  free_prepared(kept.prepared);
  // Waits for nobody in Open MPI and MPICH, though MPI calls it collective.
  MPI_Comm_free(&kept.comm);
  delete &kept;
}

/// Calls visit(message, offset, n) for each piece, in the order of an exchange's requests, until it
/// returns an error.
template <class Visit>
int for_each_piece(std::span<const Message> messages, Message::Way way, Visit visit) {
  for (const Message& message : messages) {
    if (message.way != way) continue;
    for (std::size_t at = 0; at < message.n_bytes; at += kMostBytes) {
      const auto n = static_cast<int>(std::min(kMostBytes, message.n_bytes - at));
      if (const int code = visit(message, at, n); code != MPI_SUCCESS) return code;
    }
  }
  return MPI_SUCCESS;
}

int prepare(void* handle, const Message* messages, std::size_t n_messages) {
  const Entry entry;
  Exchange& exchange = communicator(handle).prepared;
  const MPI_Comm comm = communicator(handle).comm;
  exchange.messages = {messages, n_messages};
  const int code = for_each_piece(
      exchange.messages, Message::Way::receive, [&](const Message& message, std::size_t at, int n) {
        return MPI_Recv_init(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer,
                             kDataTag, comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
  exchange.n_receives = exchange.requests.size();
  exchange.is_prepared = code == MPI_SUCCESS && n_messages > 0;
  return code;
}

int begin_sends(Exchange& exchange, MPI_Comm comm) {
  return for_each_piece(
      exchange.messages, Message::Way::send, [&](const Message& message, std::size_t at, int n) {
        return MPI_Isend(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer, kDataTag,
                         comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
}

int begin_prepared(Exchange& exchange, MPI_Comm comm) {
  // Sends first: receives are made ready while those are on their way, and they are short.
  exchange.requests.resize(exchange.n_receives);
  const int code = begin_sends(exchange, comm);
  if (code != MPI_SUCCESS) return code;
  return MPI_Startall(static_cast<int>(exchange.n_receives), exchange.requests.data());
}

void free_prepared(Exchange& exchange) {
  for (std::size_t i = 0; i < exchange.n_receives; ++i) {
    // Null where it could not be made: MPI would end the job.
    if (exchange.requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&exchange.requests[i]);
  }
  exchange = {};
}

int begin(void* handle, const Message* messages, std::size_t n_messages, void** result) {
  const Entry entry;
  if (Exchange& often = communicator(handle).prepared;
      often.is_prepared && messages == often.messages.data()) {
    *result = &often;
    return begin_prepared(often, communicator(handle).comm);
  }
  Exchange& exchange = communicator(handle).exchange;
  *result = &exchange;
  exchange.messages = {messages, n_messages};
  exchange.requests.clear();
  exchange.n_receives = 0;
  const MPI_Comm comm = communicator(handle).comm;
  // Receives first: what finds its receive waiting is copied once less.
  const int code = for_each_piece(
      exchange.messages, Message::Way::receive, [&](const Message& message, std::size_t at, int n) {
        ++exchange.n_receives;
        return MPI_Irecv(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer, kDataTag,
                         comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
  if (code != MPI_SUCCESS) return code;
  return begin_sends(exchange, comm);
}

int test(void* handle, std::size_t n_tests, std::int32_t* all_done) {
  const Entry entry;
  Exchange& exchange = *static_cast<Exchange*>(handle);
  const auto n = static_cast<int>(exchange.requests.size());
  int flag = 0;
  int code = MPI_SUCCESS;
  for (std::size_t i = 0; i < n_tests && flag == 0 && code == MPI_SUCCESS; ++i) {
    code = MPI_Testall(n, exchange.requests.data(), &flag, MPI_STATUSES_IGNORE);
  }
  *all_done = flag;
  return code;
}

int awaited(void* handle, std::int32_t* ranks, std::size_t* n_ranks) {
  const Entry entry;
  Exchange& exchange = *static_cast<Exchange*>(handle);
  *n_ranks = 0;
  std::size_t next = 0;
  for (const Message::Way way : {Message::Way::receive, Message::Way::send}) {
    const int code =
        for_each_piece(exchange.messages, way, [&](const Message& message, std::size_t, int) {
          int flag = 0;
          const int tested = MPI_Test(&exchange.requests[next++], &flag, MPI_STATUS_IGNORE);
          if (flag == 0 && (*n_ranks == 0 || ranks[*n_ranks - 1] != message.peer)) {
            ranks[(*n_ranks)++] = message.peer;
          }
          return tested;
        });
    if (code != MPI_SUCCESS) return code;
  }
  return MPI_SUCCESS;
}

/// A request that is only freed goes on reading or writing memory that is the caller's again. What
/// is cancelled, or on its way between ranks that live, ends soon. A message that its peer is
/// stopped in the middle of does not, and MPI cannot take it back.
void end(std::vector<MPI_Request>& requests, double at_most_s) {
  const double give_up = MPI_Wtime() + at_most_s;
  for (int is_done = 0;;) {
    const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &is_done,
                                 MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS || is_done != 0 || MPI_Wtime() > give_up) break;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  for (MPI_Request& request : requests) {
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
  }
}

void finish(void* handle) {
  const Entry entry;
  Exchange& exchange = *static_cast<Exchange*>(handle);
  std::vector<MPI_Request> receives, sends;
  for (std::size_t i = 0; i < exchange.requests.size(); ++i) {
    MPI_Request& request = exchange.requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    int is_over = 0;  // as a persistent one may be that did not begin
    MPI_Request_get_status(request, &is_over, MPI_STATUS_IGNORE);
    if (is_over != 0) {
      MPI_Request_free(&request);
    } else if (i < exchange.n_receives) {
      MPI_Cancel(&request);
      receives.push_back(request);
    } else {
      sends.push_back(request);
    }
  }
  end(receives, kMostSecondsToReceive);
  end(sends, kMostSecondsToSend);
  exchange = {};
}

int send_control(void* handle, int rank, const void* message, std::size_t n_bytes) {
  const Entry entry;
  int is_over = 0;
  MPI_Finalized(&is_over);
  if (is_over != 0) return MPI_SUCCESS;  // a program that ended MPI itself
  Communicator& kept = communicator(handle);
  const char* const bytes = static_cast<const char*>(message);
  const std::lock_guard lock(kept.control_mutex);
  kept.control_messages.remove_if([](Communicator::ControlMessage& sent) {
    int is_done = 0;
    return MPI_Test(&sent.request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_done != 0;
  });
  kept.control_messages.push_back({{bytes, bytes + n_bytes}, MPI_REQUEST_NULL});
  Communicator::ControlMessage& last = kept.control_messages.back();
  return MPI_Isend(last.bytes.data(), static_cast<int>(n_bytes), MPI_BYTE, rank, kControlTag,
                   kept.comm, &last.request);
}

int poll_control(void* handle, void* message, std::size_t n_bytes, std::int32_t* has_come) {
  const Entry entry;
  MPI_Status status;
  int flag = 0;
  const MPI_Comm comm = communicator(handle).comm;
  int code = MPI_Iprobe(MPI_ANY_SOURCE, kControlTag, comm, &flag, &status);
  *has_come = flag;
  if (code != MPI_SUCCESS || flag == 0) return code;
  return MPI_Recv(message, static_cast<int>(n_bytes), MPI_BYTE, status.MPI_SOURCE, kControlTag,
                  comm, MPI_STATUS_IGNORE);
}

constexpr LockstepMpi kModule = {kLockstepMpiVersion,
                                 library,
                                 error_text,
                                 start,
                                 neighbours,
                                 give_up_finalize,
                                 world,
                                 split,
                                 release,
                                 begin,
                                 prepare,
                                 test,
                                 awaited,
                                 finish,
                                 send_control,
                                 poll_control};

}  // namespace

extern "C" __attribute__((visibility("default"))) const LockstepMpi* lockstep_mpi() {
  return &kModule;
}
