#include "engines/mpi/module/mpi_exchange.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep::mpi_module {
namespace {

using message::Message;

/// MPI counts with an int. Longer messages are sent in pieces, which stay in order.
constexpr std::size_t kMaxBytes = std::size_t{1} << 30;
/// Longer messages are sent when their receiver permits it (rendezvous); the limit of Open MPI over
/// TCP.
constexpr std::size_t kMaxEagerBytes = 64 << 10;
/// For requests of an exchange that failed.
constexpr double kMaxSecondsToReceive = 1.0, kMaxSecondsToSend = 0.1;

/// Calls visit(message, offset, n) for each piece, in the order of an exchange's requests, until it
/// returns an error.
template <class Visit>
int for_each_piece(std::span<const Message> messages, Message::Direction direction, Visit visit) {
  for (const Message& message : messages) {
    if (message.direction != direction) continue;
    for (std::size_t at = 0; at < message.n_bytes; at += kMaxBytes) {
      const auto n = static_cast<int>(std::min(kMaxBytes, message.n_bytes - at));
      if (const int code = visit(message, at, n); code != MPI_SUCCESS) return code;
    }
  }
  return MPI_SUCCESS;
}

std::size_t n_pieces(std::span<const Message> messages, Message::Direction direction) {
  std::size_t n = 0;
  for_each_piece(messages, direction, [&n](const Message&, std::size_t, int) {
    ++n;
    return MPI_SUCCESS;
  });
  return n;
}

int begin(Exchange& exchange, const Route& route, Message::Direction direction) {
  const bool sends = direction == Message::Direction::send;
  MPI_Request* next = exchange.requests.data() + (sends ? exchange.n_receives : 0);
  return for_each_piece(
      exchange.messages, direction, [&](const Message& message, std::size_t at, int n) {
        char* const data = static_cast<char*>(message.data) + at;
        MPI_Request* const request = next++;
        const int rank = route.rank_of(message.peer);
        return sends ? MPI_Isend(data, n, MPI_BYTE, rank, route.tag, route.comm, request)
                     : MPI_Irecv(data, n, MPI_BYTE, rank, route.tag, route.comm, request);
      });
}

/// Waits for requests, for at_most_s, and frees the rest. Returns whether there are none. Cancelled
/// requests, and messages between live ranks, end soon. A message whose peer is stopped in the
/// middle does not, and MPI cannot cancel it.
bool wait_and_free(std::span<MPI_Request> requests, double at_most_s) {
  const double give_up = MPI_Wtime() + at_most_s;
  for (;;) {
    bool are_over = true;
    for (MPI_Request& request : requests) {
      int is_done = 0;
      const bool is_over = request == MPI_REQUEST_NULL ||
                           (MPI_Test(&request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS
                                ? is_done != 0
                                : request == MPI_REQUEST_NULL);  // it failed
      are_over = are_over && is_over;
    }
    if (are_over || MPI_Wtime() > give_up) {
      for (MPI_Request& request : requests) {
        if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
      }
      return are_over;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

int prepare(Exchange& exchange, const Route& route, std::span<const Message> messages) {
  exchange.messages = messages;
  const int code = for_each_piece(
      messages, Message::Direction::receive, [&](const Message& message, std::size_t at, int n) {
        return MPI_Recv_init(static_cast<char*>(message.data) + at, n, MPI_BYTE,
                             route.rank_of(message.peer), route.tag, route.comm,
                             &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
  exchange.n_receives = exchange.requests.size();
  exchange.is_prepared = code == MPI_SUCCESS && !messages.empty();
  return code;
}

int begin(Exchange& exchange, const Route& route, std::span<const Message> messages) {
  using Direction = Message::Direction;
  exchange.requests.clear();  // if allocating the new ones fails, none are left
  exchange.messages = messages;
  exchange.n_receives = n_pieces(messages, Direction::receive);
  exchange.requests.assign(exchange.n_receives + n_pieces(messages, Direction::send),
                           MPI_REQUEST_NULL);
  // Short messages: receives first, because a message whose receive is posted before it arrives is
  // copied once less. Long ones: sends first. A receive that is posted after its message was
  // announced clears it to send at once. The peer would then send all of it before it clears the
  // message in the other direction, whose announcement it has not received yet, and over TCP the
  // two would be transferred one after the other.
  const bool is_long = std::ranges::any_of(
      messages, [](const Message& message) { return message.n_bytes > kMaxEagerBytes; });
  const int code = begin(exchange, route, is_long ? Direction::send : Direction::receive);
  if (code != MPI_SUCCESS) return code;
  return begin(exchange, route, is_long ? Direction::receive : Direction::send);
}

int begin_prepared(Exchange& exchange, const Route& route) {
  using Direction = Message::Direction;
  exchange.requests.resize(exchange.n_receives + n_pieces(exchange.messages, Direction::send),
                           MPI_REQUEST_NULL);
  // Sends first: the receives are started while the data is in transit.
  const int code = begin(exchange, route, Direction::send);
  if (code != MPI_SUCCESS) return code;
  return MPI_Startall(static_cast<int>(exchange.n_receives), exchange.requests.data());
}

void free_prepared(Exchange& exchange) {
  for (std::size_t i = 0; i < exchange.n_receives; ++i) {
    // Null if it could not be made: MPI ends the job if a null request is freed.
    if (exchange.requests[i] != MPI_REQUEST_NULL) MPI_Request_free(&exchange.requests[i]);
  }
  exchange = {};
}

int test(Exchange& exchange, std::size_t n_tests, std::int32_t* all_done) {
  const auto n = static_cast<int>(exchange.requests.size());
  int flag = 0;
  int code = MPI_SUCCESS;
  for (std::size_t i = 0; i < n_tests && flag == 0 && code == MPI_SUCCESS; ++i) {
    code = MPI_Testall(n, exchange.requests.data(), &flag, MPI_STATUSES_IGNORE);
  }
  *all_done = flag;
  return code;
}

int awaited(Exchange& exchange, std::int32_t* ranks, std::size_t* n_ranks) {
  *n_ranks = 0;
  std::size_t next = 0;
  for (const Message::Direction direction :
       {Message::Direction::receive, Message::Direction::send}) {
    const int code =
        for_each_piece(exchange.messages, direction, [&](const Message& message, std::size_t, int) {
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

/// Allocates nothing: the call that it ends may have run out of memory.
bool finish(Exchange& exchange) {
  for (std::size_t i = 0; i < exchange.requests.size(); ++i) {
    MPI_Request& request = exchange.requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    int is_over = 0;  // or, for a persistent request, not started
    MPI_Request_get_status(request, &is_over, MPI_STATUS_IGNORE);
    if (is_over != 0) {
      MPI_Request_free(&request);
    } else if (i < exchange.n_receives) {
      MPI_Cancel(&request);
    }
  }
  const std::span<MPI_Request> requests(exchange.requests);
  const std::size_t n_receives = std::min(exchange.n_receives, requests.size());
  const bool has_received = wait_and_free(requests.first(n_receives), kMaxSecondsToReceive);
  wait_and_free(requests.subspan(n_receives), kMaxSecondsToSend);
  exchange = {};
  return has_received;
}

}  // namespace lockstep::mpi_module
