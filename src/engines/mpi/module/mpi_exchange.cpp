#include "engines/mpi/module/mpi_exchange.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep::mpi_module {
namespace {

using message::Message;

constexpr int kDataTag = 1;
/// MPI counts with an int. Longer messages are sent in pieces, which stay in order.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;
/// For requests of an exchange that failed.
constexpr double kMostSecondsToReceive = 1.0, kMostSecondsToSend = 0.1;

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

int begin_sends(Exchange& exchange, MPI_Comm comm) {
  return for_each_piece(
      exchange.messages, Message::Way::send, [&](const Message& message, std::size_t at, int n) {
        return MPI_Isend(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer, kDataTag,
                         comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
}

/// Waits for requests, for at_most_s, and frees the rest, which MPI would go on to read or write in
/// memory that belongs to the caller again. Cancelled requests, and messages between live ranks,
/// end soon. A message whose peer is stopped in the middle does not, and MPI cannot cancel it.
void wait_and_free(std::vector<MPI_Request>& requests, double at_most_s) {
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

}  // namespace

int prepare(Exchange& exchange, MPI_Comm comm, std::span<const Message> messages) {
  exchange.messages = messages;
  const int code = for_each_piece(
      messages, Message::Way::receive, [&](const Message& message, std::size_t at, int n) {
        return MPI_Recv_init(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer,
                             kDataTag, comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
  exchange.n_receives = exchange.requests.size();
  exchange.is_prepared = code == MPI_SUCCESS && !messages.empty();
  return code;
}

int begin(Exchange& exchange, MPI_Comm comm, std::span<const Message> messages) {
  exchange.messages = messages;
  exchange.requests.clear();
  exchange.n_receives = 0;
  // Receives first: a message whose receive is posted before it arrives is copied once less.
  const int code = for_each_piece(
      messages, Message::Way::receive, [&](const Message& message, std::size_t at, int n) {
        ++exchange.n_receives;
        return MPI_Irecv(static_cast<char*>(message.data) + at, n, MPI_BYTE, message.peer, kDataTag,
                         comm, &exchange.requests.emplace_back(MPI_REQUEST_NULL));
      });
  return code != MPI_SUCCESS ? code : begin_sends(exchange, comm);
}

int begin_prepared(Exchange& exchange, MPI_Comm comm) {
  // Sends first: the receives are started while the data is in transit.
  exchange.requests.resize(exchange.n_receives);
  const int code = begin_sends(exchange, comm);
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

void finish(Exchange& exchange) {
  std::vector<MPI_Request> receives, sends;
  for (std::size_t i = 0; i < exchange.requests.size(); ++i) {
    MPI_Request& request = exchange.requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    int is_over = 0;  // or, for a persistent request, not started
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
  wait_and_free(receives, kMostSecondsToReceive);
  wait_and_free(sends, kMostSecondsToSend);
  exchange = {};
}

}  // namespace lockstep::mpi_module
