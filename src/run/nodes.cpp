#include "run/nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <lockstep/error.hpp>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <utility>

#include "base/boot_clock.hpp"
#include "base/fd.hpp"
#include "base/patience.hpp"
#include "run/errors.hpp"
#include "run/node_link.hpp"
#include "run/node_message.hpp"
#include "run/rank_environment.hpp"
#include "world/environment.hpp"

namespace lockstep::run {
namespace {

using Kind = NodeMessageKind;
using std::chrono::milliseconds;

constexpr milliseconds kRetryEvery{100};
/// Limit of the last messages, to nodes that do not read.
constexpr milliseconds kMostToSend{1000};

}  // namespace

RankLayout single_node_layout(int n_ranks, const std::string& run_id) {
  RankLayout placement;
  placement.run_id = run_id;
  placement.world_size = n_ranks;
  placement.ranks_of = {n_ranks};
  placement.master_addr = "127.0.0.1";
  choose_master_port(placement);
  return placement;
}

Nodes::Nodes(const Options& options, int n_restarts, const std::string& run_id,
             const Signals& signals, std::uint32_t left_job)
    : options_(options.nodes),
      elastic_(options.elastic),
      n_ranks_(options.n_ranks),
      left_job_(left_job),
      limit_(left_job != 0 ? elastic_.start_limit : options_.timeout),
      address_(fmt::format("{}:{}", options_.host, options_.port)),
      deadline_(Clock::now() + limit_),
      lease_(elastic_.lease) {
  placement_.node_rank = options_.node_rank;
  placement_.n_nodes = options_.n_nodes;
  placement_.run_id = run_id;
  placement_.master_addr = options_.host;
  options_.has_ucx = internal::has_ucx();
  if (is_elastic() && !options_.has_ucx) {
    throw usage_error(
        "--elastic over several nodes needs the module liblockstep-ucx.so (lockstep-ucx)");
  }
  if (options_.node_rank == 0) {
    accept_nodes(signals, n_restarts);
  } else {
    join_node_0(signals, n_restarts);
  }
  if (!links_.empty()) placement_.interface = interface_of(links_.front()->fd());
}

Nodes::~Nodes() {
  for (const auto end = Clock::now() + kMostToSend; Clock::now() < end;) {
    std::vector<pollfd> entries;
    for (const auto& link : links_) {
      link->send_rest();
      if (link->is_open() && link->has_unsent()) entries.push_back({link->fd(), POLLOUT, 0});
    }
    if (entries.empty() || ::poll(entries.data(), entries.size(), timeout_to(end)) <= 0) return;
  }
}

/// A node that was a member asks until its limit, however often its link breaks.
void Nodes::join_node_0(const Signals& signals, int n_restarts) {
  while (true) try {
      connect_to_node_0(signals);
      placement_ = parse_layout(greet_node_0(signals, n_restarts), options_, address_, n_ranks_);
      if (is_elastic()) wait_for_lease(signals);
      return;
    } catch (const Closed& closed) {
      if (left_job_ == 0 || Clock::now() > deadline_) {
        throw PeerLost(launcher_context(), closed.text);
      }
      links_.clear();
    }
}

std::string Nodes::limit() const {
  return fmt::format("{:g} s", std::chrono::duration<double>(limit_).count());
}

void Nodes::reject_all(const std::string& text) {
  for (const auto& link : links_) link->send(NodeMessage(Kind::rejected, text));
  throw MismatchError(launcher_context(), text);
}

void Nodes::reject(Link& link, const std::string& text) {
  rejected_ = fmt::format("{} (it connected from {})", text, link.peer());
  link.send(NodeMessage(Kind::rejected, text));
  link.close();
}

// --- bootstrap ------------------------------------------------------------------------------

void Nodes::accept_nodes(const Signals& signals, int n_restarts) {
  listener_ = listen_at(options_);
  if (!listener_) {
    throw system_error(fmt::format(
        "node 0 cannot listen at {}; --rdzv must be an address of node 0's machine and a "
        "port that is free there",
        address_));
  }
  std::vector<int> ranks_of(static_cast<std::size_t>(options_.n_nodes), 0);
  ranks_of[0] = n_ranks_;
  while (std::find(ranks_of.begin(), ranks_of.end(), 0) != ranks_of.end()) {
    std::vector<pollfd> entries;
    append_to(entries);
    poll_or_interrupt(entries, deadline_, signals);
    const int shortage = accept_pending(listener_.get(), options_.secret, links_);
    for (const auto& link : links_) {
      link->send_rest();
      const auto hello = link->receive();
      if (hello && greet(*link, *hello, n_restarts, ranks_of)) {
        ranks_of[static_cast<std::size_t>(link->node_rank)] = hello->message.n_ranks;
      }
      if (link->is_open() || link->node_rank < 0) continue;
      ranks_of[static_cast<std::size_t>(link->node_rank)] = 0;  // it may connect again
    }
    drop_links(shortage);
    if (Clock::now() > deadline_) fail_missing(ranks_of);
  }
  std::erase_if(links_, [](const auto& link) { return link->node_rank < 0; });
  if (!is_elastic()) listener_.reset();
  send_layout(std::move(ranks_of));
}

bool Nodes::greet(Link& link, const ReceivedMessage& received, int n_restarts,
                  std::span<const int> ranks_of) {
  const NodeMessage& hello = received.message;
  HelloReply reply = validate_hello(received, options_, elastic_, address_, n_restarts, ranks_of);
  if (reply.action == HelloReply::Action::join) {
    const auto node = static_cast<std::size_t>(hello.node_rank);
    if (hello.key != 0 && hello.key != placement_.key) {
      reply = {.action = HelloReply::Action::reject,
               .text = fmt::format("the job of node {} has ended; at {} is another one",
                                   hello.node_rank, address_)};
    } else if (runs() && hello.n_ranks != placement_.ranks_of[node]) {
      reply = {
          .action = HelloReply::Action::reject,
          .text = fmt::format("node {} had {} ranks, and returns to {} with {}", hello.node_rank,
                              placement_.ranks_of[node], address_, hello.n_ranks)};
    }
  }
  switch (reply.action) {
    case HelloReply::Action::ignore: link.close(); return false;
    case HelloReply::Action::reject_all:
      if (!runs()) reject_all(reply.text);
      [[fallthrough]];
    case HelloReply::Action::reject: reject(link, reply.text); return false;
    case HelloReply::Action::join: break;
  }
  link.identify(hello.node_rank);
  host_names_[hello.node_rank] = text_of(hello);
  // The report of missing nodes must arrive before any node's timeout.
  deadline_ = std::min(deadline_, Clock::now() + reply.timeout);
  return true;
}

void Nodes::drop_links(int shortage) {
  auto n_unidentified = static_cast<std::size_t>(std::ranges::count_if(
      links_, [](const auto& link) { return link->is_open() && link->node_rank < 0; }));
  if (shortage != 0 && n_unidentified == 0 && !runs()) {
    errno = shortage;
    throw system_error(
        fmt::format("node 0 cannot accept another node at {}: raise the limit of open files "
                    "(ulimit -n)",
                    address_));
  }
  const std::size_t most =
      shortage == 0 ? std::max(kMaxUnidentified, static_cast<std::size_t>(options_.n_nodes))
                    : std::max<std::size_t>(n_unidentified, 1) - 1;
  std::erase_if(links_, [&](const auto& link) {
    if (link->is_open() && (link->node_rank >= 0 || n_unidentified <= most)) return false;
    if (link->is_open()) --n_unidentified;
    return true;
  });
}

void Nodes::fail_missing(const std::vector<int>& ranks_of) {
  std::vector<int> missing;
  for (int node = 0; node < options_.n_nodes; ++node) {
    if (ranks_of[static_cast<std::size_t>(node)] == 0) missing.push_back(node);
  }
  const std::string text = fmt::format(
      "node{} {} of {} did not connect to {} within {}; start `lockstep run` there with the same "
      "--nnodes and --rdzv{}",
      missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), options_.n_nodes, address_, limit(),
      rejected_.empty() ? "" : "; rejected: " + rejected_);
  for (const auto& link : links_) link->send(NodeMessage(Kind::rejected, text));
  throw TimeoutError(launcher_context(), text);
}

void Nodes::send_layout(std::vector<int> ranks_of) {
  choose_master_port(placement_);
  placement_.key = std::random_device{}();
  placement_.world_size = std::accumulate(ranks_of.begin(), ranks_of.end(), 0);
  placement_.ranks_of = std::move(ranks_of);
  for (const auto& link : links_) send_layout_to(*link);
}

void Nodes::send_layout_to(Link& link) {
  NodeMessage placed(Kind::placed, placement_.run_id);
  placed.master_port = placement_.master_port;
  placed.key = placement_.key;
  placed.world_size = placement_.world_size;
  const std::span<const int> ranks_of = placement_.ranks_of;
  const auto before = ranks_of.first(static_cast<std::size_t>(link.node_rank));
  placed.first_rank = std::accumulate(before.begin(), before.end(), 0);
  placed.incarnation = link.incarnation;
  placed.n_body_bytes = static_cast<std::uint32_t>(ranks_of.size_bytes());
  link.send(placed, body_of(ranks_of));
}

void Nodes::accept_again() {
  const int shortage = accept_pending(listener_.get(), options_.secret, links_);
  for (const auto& link : links_) {
    if (link->node_rank >= 0 && !link->is_joining) continue;
    const auto hello = link->receive();
    if (!hello || link->is_joining) continue;
    // Each node but this one may return.
    std::vector<int> ranks_of(placement_.ranks_of.size(), 0);
    ranks_of[0] = n_ranks_;
    link->is_joining = greet(*link, *hello, /*n_restarts=*/0, ranks_of);
  }
  drop_links(shortage);
}

void Nodes::connect_to_node_0(const Signals& signals) {
  const Addresses addresses = resolve(options_.host.c_str(), options_);
  base::UniqueFd fd;
  for (const addrinfo* address = addresses.get(); !fd;) {
    fd = open_socket(*address);
    const int error_number = connect(fd.get(), *address, deadline_, signals);
    if (error_number == 0) break;
    fd.reset();
    if (left_job_ != 0 && error_number == ECONNREFUSED) {
      throw PeerLost(launcher_context(),
                     fmt::format("node 0 is lost: its `lockstep run` at {} has ended", address_));
    }
    if (Clock::now() > deadline_) {
      throw TimeoutError(
          launcher_context(),
          fmt::format("node {} cannot reach node 0 at {} within {}: {}; start `lockstep run "
                      "--node-rank 0` there, and allow connections to its port",
                      options_.node_rank, address_, limit(), std::strerror(error_number)));
    }
    poll_or_interrupt({}, std::min(deadline_, Clock::now() + kRetryEvery), signals);
    address = address->ai_next != nullptr ? address->ai_next : addresses.get();
  }
  links_.push_back(std::make_unique<Link>(std::move(fd), options_.secret, /*is_known=*/true));
  links_.front()->node_rank = 0;
}

/// Returns node 0's reply.
ReceivedMessage Nodes::greet_node_0(const Signals& signals, int n_restarts) {
  Link& link = *links_.front();
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  NodeMessage hello(Kind::hello, name.data());
  hello.node_rank = options_.node_rank;
  hello.n_nodes = options_.n_nodes;
  hello.n_ranks = n_ranks_;
  hello.least = elastic_.least;
  hello.most = elastic_.most;
  hello.lease_ms = elastic_.lease.count();
  hello.n_restarts = n_restarts;
  hello.key = left_job_;
  hello.has_ucx = options_.has_ucx ? 1 : 0;
  hello.timeout_ms = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now()).count();
  link.greet(hello);
  std::optional<ReceivedMessage> reply;
  while (!(reply = link.receive())) {
    if (!link.is_open()) {
      throw Closed{
          fmt::format("{} {}", address_,
                      link.is_foreign()
                          ? "answers, but not as `lockstep run --node-rank 0`; --rdzv takes a port "
                            "that no other program uses"
                          : "closed the connection: node 0 ended, or rejected this node")};
    }
    if (Clock::now() > deadline_ + base::patience::kLeadersReport) {
      throw TimeoutError(launcher_context(),
                         fmt::format("node 0 at {} does not answer within {}", address_, limit()));
    }
    poll_or_interrupt({{.fd = link.fd(), .events = POLLIN, .revents = 0}},
                      deadline_ + base::patience::kLeadersReport, signals);
  }
  return *reply;
}

// --- running --------------------------------------------------------------------------------

void Nodes::append_to(std::vector<pollfd>& entries) const {
  if (listener_) entries.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
  for (const auto& link : links_) {
    const auto events = static_cast<short>(POLLIN | (link->has_unsent() ? POLLOUT : 0));
    if (link->is_open()) entries.push_back({.fd = link->fd(), .events = events, .revents = 0});
  }
}

std::optional<NodeFailure> Nodes::service() {
  if (is_elastic() && !over_) {
    if (placement_.node_rank == 0) {
      accept_again();
    } else {
      beat();
    }
  }
  for (const auto& link : links_) {
    if (!link->is_open()) continue;
    link->send_rest();
    if (link->node_rank < 0 || link->is_joining) continue;
    while (const auto received = link->receive()) {
      const NodeMessage* const message = &received->message;
      if (message->kind == Kind::event && placement_.node_rank == 0) {
        auto event = read_event(*message, link->node_rank);
        if (event) events_.push_back(std::move(*event));
      }
      if (message->kind == Kind::command && placement_.node_rank != 0) {
        auto command = read_command(*received);
        if (command && command->kind == NodeCommand::Kind::echo) {
          lease_.echoed(command->sent);
        } else if (command) {
          commands_.push_back(std::move(*command));
        }
      }
      if (message->kind == Kind::address) {
        addresses_.push_back(read_address(*message));
        if (placement_.node_rank == 0) send_to_members(*message, /*but=*/link.get());
      }
      if (message->kind == Kind::store) {
        store_messages_.push_back(read_store(*received, link->node_rank));
      }
      if (message->kind == Kind::failed && !over_) {
        const NodeFailure failure = read_failed(*message);
        report_failed(failure);
        return failure;
      }
      if (message->kind == Kind::all_done) over_ = true;
      if (message->kind == Kind::done && !std::exchange(link->is_done, true)) {
        ++n_done_;
        finish_if_all_done();
      }
    }
    // In an elastic job the ranks of a node may run until its lease has run out.
    if (link->is_open() || over_ || is_elastic()) continue;
    const NodeFailure failure{
        .exit_code = 1,
        .interrupted = false,
        .text = fmt::format("node {} is lost: its `lockstep run`, or its machine, is gone",
                            link->node_rank)};
    report_failed(failure);
    return failure;
  }
  return std::nullopt;
}

void Nodes::send(const RankAddress& address) { send_to_members(message_of(address)); }

void Nodes::send(const StoreMessage& store) {
  Link* const link = link_of(placement_.node_rank == 0 ? store.node : 0);
  if (link == nullptr) return;
  const ReceivedMessage sent = message_of(store);
  link->send(sent.message, sent.body);
}

void Nodes::send_to_members(const NodeMessage& message, const Link* but) {
  for (const auto& link : links_) {
    if (link.get() != but && link->node_rank >= 0 && !link->is_joining) link->send(message);
  }
}

void Nodes::report_done() {
  if (done_reported_ || over_) return;
  done_reported_ = true;
  ++n_done_;
  if (placement_.node_rank == 0) {
    finish_if_all_done();
    return;
  }
  links_.front()->send(NodeMessage(Kind::done));
}

void Nodes::finish_if_all_done() {
  if (placement_.node_rank != 0 || n_done_ < options_.n_nodes) return;
  over_ = true;
  send_to_members(NodeMessage(Kind::all_done));
  reject_joining("the job has ended");
}

void Nodes::end() {
  n_done_ = options_.n_nodes;
  finish_if_all_done();
}

void Nodes::report_failed(const NodeFailure& failure) {
  if (over_) return;
  over_ = true;
  NodeMessage message(Kind::failed, failure.text);
  message.exit_code = failure.exit_code;
  message.interrupted = failure.interrupted ? 1 : 0;
  message.rank = failure.rank;
  send_to_members(message);
  reject_joining("the job has ended: " + failure.text);
}

void Nodes::reject_joining(const std::string& text) {
  for (const auto& link : links_) {
    if (link->is_joining) link->send(NodeMessage(Kind::rejected, text));
  }
}

// --- an elastic job ---------------------------------------------------------------------------

Link* Nodes::link_of(int node) const {
  const auto found = std::ranges::find_if(
      links_, [&](const auto& link) { return link->node_rank == node && !link->is_joining; });
  return found == links_.end() ? nullptr : found->get();
}

std::vector<int> Nodes::joining() const {
  std::vector<int> nodes;
  for (const auto& link : links_) {
    if (link->is_joining && link->is_open()) nodes.push_back(link->node_rank);
  }
  return nodes;
}

void Nodes::welcome(int node, int incarnation) {
  drop(node);
  for (const auto& link : links_) {
    if (link->node_rank != node || !std::exchange(link->is_joining, false)) continue;
    link->incarnation = incarnation;
    return send_layout_to(*link);
  }
}

void Nodes::drop(int node) {
  std::erase_if(links_,
                [&](const auto& link) { return link->node_rank == node && !link->is_joining; });
}

void Nodes::send(int node, const NodeCommand& command) {
  Link* const link = link_of(node);
  if (link == nullptr) return;
  const ReceivedMessage sent = message_of(command);
  link->send(sent.message, sent.body);
}

std::string Nodes::name_of(int node) const {
  return fmt::format("node {} ({})", node, host_names_.at(node));
}

void Nodes::report(NodeEvent event) {
  NodeMessage message = message_of(event);
  message.incarnation = placement_.incarnation;
  message.number = ++n_reports_;
  links_.front()->send(message);
}

void Nodes::beat() {
  if (Clock::now() < next_beat_) return;
  next_beat_ = Clock::now() + elastic_.lease / 5;
  report({.kind = NodeEvent::Kind::heartbeat, .sent = base::BootClock::now()});
}

std::vector<NodeCommand> Nodes::take_commands() { return std::exchange(commands_, {}); }

bool Nodes::is_cut_off() const {
  return is_elastic() && placement_.node_rank != 0 && !over_ &&
         (!links_.front()->is_open() || lease_.has_run_out(base::BootClock::now()));
}

milliseconds Nodes::idle_for() const {
  if (!is_elastic() || placement_.node_rank == 0 || over_) return milliseconds::max();
  return std::max(std::chrono::ceil<milliseconds>(next_beat_ - Clock::now()), milliseconds(0));
}

/// Ranks may run only with a lease: see NodeLease.
void Nodes::wait_for_lease(const Signals& signals) {
  deadline_ = std::max(deadline_, Clock::now() + elastic_.lease);
  while (lease_.has_run_out(base::BootClock::now())) {
    std::vector<pollfd> entries;
    append_to(entries);
    poll_or_interrupt(entries, std::min(deadline_, next_beat_), signals);
    const auto failure = service();
    if (failure) throw PeerLost(launcher_context(), failure->text);
    if (!links_.front()->is_open()) {
      throw Closed{fmt::format("node 0 at {} closed the connection", address_)};
    }
    if (Clock::now() > deadline_) {
      throw TimeoutError(launcher_context(),
                         fmt::format("node 0 at {} does not answer within {}", address_, limit()));
    }
  }
}

}  // namespace lockstep::run
