#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <lockstep/error.hpp>
#include <map>
#include <new>
#include <optional>
#include <utility>

#include "base/cpus.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "run/attempt.hpp"
#include "run/describe.hpp"

// What the ranks ask of their launcher: the next world, the addresses of all ranks, and their
// store.
namespace lockstep::run {
namespace {

constexpr std::chrono::milliseconds kYear = std::chrono::hours(24 * 365);

std::optional<std::int64_t> last_generation_of(const shared::LauncherRequest& request) {
  if (request.last_generation < 0) return std::nullopt;
  return request.last_generation;
}

}  // namespace

void Attempt::serve(int place) {
  Place& asking = at(place);
  base::UniqueFd& socket = asking.socket;
  const shared::LauncherRequest question = shared::receive_request(socket.get());
  switch (question.kind) {
    case shared::LauncherRequest::Kind::none: return;
    case shared::LauncherRequest::Kind::closed: socket.reset(); return;
    case shared::LauncherRequest::Kind::next_world: break;
    case shared::LauncherRequest::Kind::store:
    case shared::LauncherRequest::Kind::addresses:
      if (phase_ != Phase::running) {
        return shared::refuse(socket.get(), question.number, 0, why_it_ends_);
      }
      if (is_elastic() && (question.world != static_cast<std::uint64_t>(generations_.newest()) ||
                           newest().job->is_over())) {
        return shared::refuse(socket.get(), question.number, EOWNERDEAD,
                              "its generation of the world is over");
      }
      if (question.kind == shared::LauncherRequest::Kind::store) return ask_store(place, question);
      asking.address_request = AddressRequest{.number = question.number,
                                              .world = question.world,
                                              .end = Clock::now() + std::min(question.limit, kYear),
                                              .limit = question.limit};
      give_address({.rank = newest().first_rank + newest().number_of(place).value_or(0),
                    .world = question.world,
                    .bytes = question.bytes});
      if (is_elastic()) {
        tell_rule({.kind = NodeEvent::Kind::gave_address,
                   .place = world_rank(place),
                   .generation = generations_.newest()});
      }
      return;
  }
  if (is_elastic()) {
    if (phase_ != Phase::running)
      return shared::refuse(socket.get(), question.number, 0, why_it_ends_);
    read_progress();
    asking.request = Request{.number = question.number,
                             .process = process_of(place),
                             .last_generation = last_generation_of(question),
                             .is_pending = true};
    return tell_rule({.kind = NodeEvent::Kind::asked,
                      .place = world_rank(place),
                      .generation = asking.newest_generation,
                      .limit = question.limit});
  }
  try {
    answer(place, question.number);
  } catch (const SystemError& error) {
    shared::refuse(socket.get(), question.number, error.error_number(), error.text());
  } catch (const std::bad_alloc&) {
    shared::refuse(socket.get(), question.number, ENOMEM, "no memory for its segment");
  }
}

void Attempt::answer(int place, std::uint64_t number) {
  Place& asking = at(place);
  const World& last = newest();
  const int next = generations_.next_of(place, last.job->has_rank_left());
  if (!worlds_.contains(next)) {
    worlds_.emplace(
        next, World{.job = last.job->next(), .places = last.places, .first_rank = last.first_rank});
  }
  asking.request = Request{.number = number,
                           .process = process_of(place),
                           .last_generation = std::nullopt,
                           .is_pending = false};
  generations_.enter(place, next);
  shared::answer(asking.socket.get(), number, worlds_.at(next).job->fd(),
                 {.rank = place,
                  .size = context_.options.n_ranks,
                  .world_rank = world_rank(place),
                  .world_size = placement_.world_size});
  worlds_.erase(worlds_.begin(), worlds_.lower_bound(generations_.oldest()));
}

void Attempt::give_address(const RankAddress& address) {
  addresses_.add(address);
  if (nodes_ != nullptr) nodes_->send(address);
}

void Attempt::answer_addresses() {
  if (nodes_ != nullptr) {
    // After the choice of the generation that they are of.
    for (RankAddress& address : nodes_->take_addresses()) {
      const auto newest = static_cast<std::uint64_t>(generations_.newest());
      if (!is_elastic() || address.world == newest) addresses_.add(std::move(address));
    }
  }
  std::map<std::uint64_t, base::UniqueFd> memory_of;  // by world
  for (int number = 0; number < n_places(); ++number) {
    Place& place = at(number);
    if (!place.address_request) continue;
    const AddressRequest request = *place.address_request;
    const int socket = place.socket.get();
    const bool has_formed = !is_elastic() || request.world <= static_cast<std::uint64_t>(formed_);
    if (has_formed && addresses_.are_known(request.world)) try {
        base::UniqueFd& memory = memory_of[request.world];
        if (!memory) {
          memory = shared::make_memory_of(
              {.by_rank = addresses_.of(request.world),
               .hosts = hosts_,
               .n_cores = base::n_usable_cores(),
               // A message of another world is none of this one.
               .key = placement_.key + static_cast<std::uint32_t>(request.world)});
        }
        shared::answer_addresses(socket, request.number, memory.get());
      } catch (const SystemError& error) {
        shared::refuse(socket, request.number, error.error_number(), error.text());
      }
    else if (Clock::now() >= request.end) {
      shared::refuse(socket, request.number, ETIMEDOUT,
                     fmt::format("{} of {} did not call init_dist within {:g} s",
                                 list_of(addresses_.missing(request.world)), hosts_.size(),
                                 seconds(request.limit)));
      give_address({.rank = newest().first_rank + newest().number_of(number).value_or(0),
                    .world = request.world,
                    .bytes = {}});
    } else {
      continue;
    }
    place.address_request.reset();
    // Every rank has asked for the world after those that nobody asks for any more.
    std::uint64_t oldest = request.world;
    for (const Place& other : places_) {
      if (other.address_request) oldest = std::min(oldest, other.address_request->world);
    }
    addresses_.forget_before(oldest);
  }
}

void Attempt::ask_store(int place, const shared::LauncherRequest& question) {
  StoreMessage asked{.node = placement_.node_rank,
                     .place = world_rank(place),
                     .process = at(place).process.leader(),
                     .number = question.number,
                     .world = question.world,
                     .bytes = question.bytes};
  if (placement_.node_rank != 0) return nodes_->send(asked);
  asked.bytes = store_.answer(asked.world, asked.bytes);
  answer_store(asked);
}

void Attempt::serve_store() {
  if (nodes_ == nullptr) return;
  for (StoreMessage& message : nodes_->take_store_messages()) {
    if (placement_.node_rank == 0) {
      message.bytes = store_.answer(message.world, message.bytes);
      nodes_->send(message);
    } else if (is_here(message.place)) {
      answer_store(message);
    }
  }
}

void Attempt::answer_store(const StoreMessage& answer) {
  const Place& asking = at(answer.place - placement_.first_rank);
  // A process that has replaced the one that asked may have asked under the same number.
  if (asking.process.leader() != answer.process) return;
  shared::answer_store(asking.socket.get(), answer.number, answer.bytes);
}

void Attempt::end_world(std::string_view why, int rank) {
  for (const auto& [number, world] : worlds_) {
    const bool is_watched = nodes_ != nullptr || world.job->has_joined_other_engine();
    if (is_watched) world.job->end_generation(why, rank);
  }
  refuse_addresses(why, rank);
}

void Attempt::refuse_addresses(std::string_view why, int rank) {
  for (Place& place : places_) {  // that have not joined yet
    if (!place.address_request) continue;
    shared::refuse(place.socket.get(), place.address_request->number, EOWNERDEAD, why, rank);
    place.address_request.reset();
  }
}

}  // namespace lockstep::run
