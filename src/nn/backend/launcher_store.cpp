#include "nn/backend/launcher_store.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lockstep/error.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fork_guard.hpp"
#include "engines/shared/bootstrap/launcher_socket.hpp"
#include "engines/shared/bootstrap/shared_world.hpp"
#include "nn/gloo_engine/c10d_rendezvous.hpp"
#include "world/session.hpp"

namespace lockstep::backend {
namespace {

using shared::StoreAnswer;
using shared::StoreRequest;
using Bytes = std::vector<std::uint8_t>;
using std::chrono::milliseconds;

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

class LauncherStore final : public c10d::Store {
  using Kind = StoreRequest::Kind;
  using Status = StoreAnswer::Status;

 public:
  LauncherStore(int socket, int rank, std::uint64_t world, milliseconds timeout,
                std::shared_ptr<const shared::Elastic> elastic)
      : Store(timeout), socket_(socket), rank_(rank), world_(world), elastic_(std::move(elastic)) {}

  // Not `override`: older versions of c10d have none.
  c10::intrusive_ptr<Store> clone() {
    return c10::make_intrusive<LauncherStore>(socket_, rank_, world_, timeout_, elastic_);
  }
  void set(const std::string& key, const Bytes& value) override {
    ask({.kind = Kind::set, .words = {key, text_of(value)}}, timeout_);
  }
  void append(const std::string& key, const Bytes& value) override {
    const auto answer = ask({.kind = Kind::append, .words = {key, text_of(value)}}, timeout_);
    if (answer.status == Status::too_long) {
      throw UsageError(context(), fmt::format("the value of '{}' would have more than {} KiB", key,
                                              shared::kMaxStoreBytes / 2 >> 10U));
    }
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return bytes_of(
        ask({.kind = Kind::compare_set, .words = {key, text_of(expected), text_of(desired)}},
            timeout_)
            .value);
  }
  Bytes get(const std::string& key) override {
    StoreAnswer answer;
    wait_until({key}, timeout_, [&](milliseconds left) {
      answer = ask({.kind = Kind::get, .words = {key}}, left);
      return answer.status != Status::missing;
    });
    return bytes_of(answer.value);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const StoreAnswer answer = ask({.kind = Kind::add, .amount = amount, .words = {key}}, timeout_);
    if (answer.status == Status::not_a_number) {
      throw UsageError(context(), fmt::format("the value of '{}' is no number, or the sum of it "
                                              "and {} is too large",
                                              key, amount));
    }
    return answer.number;
  }
  bool deleteKey(const std::string& key) override {
    return ask({.kind = Kind::remove, .words = {key}}, timeout_).number > 0;
  }
  bool check(const std::vector<std::string>& keys) override { return check(keys, timeout_); }
  std::int64_t getNumKeys() override { return ask({.kind = Kind::count}, timeout_).number; }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    wait_until(keys, timeout, [&](milliseconds left) { return check(keys, left); });
  }

 private:
  ErrorContext context() const {
    return {.operation = "store", .group = "world", .rank = rank_, .where = {}};
  }
  /// In as many requests as their limit takes.
  bool check(const std::vector<std::string>& keys, milliseconds limit) const {
    StoreRequest request{.kind = Kind::check};
    for (std::size_t i = 0, n_bytes = 0; i < keys.size(); ++i) {
      n_bytes += keys[i].size();
      request.words.push_back(keys[i]);
      const bool is_full = n_bytes + request.words.size() * 8 > shared::kMaxStoreBytes / 4;
      if (!is_full && i + 1 < keys.size()) continue;
      if (ask(request, limit).status != Status::done) return false;
      request.words.clear();
      n_bytes = 0;
    }
    return true;
  }
  StoreAnswer ask(const StoreRequest& request, milliseconds limit) const {
    if (process_.is_forked_child()) {
      throw UsageError(context(),
                       "this process is a fork of a rank; only the rank itself may use the store");
    }
    try {
      // Not at the caller's line, for which each look of a wait would take Python's lock.
      return shared::ask_store(
          socket_, rank_, world_, request,
          {.group = "world", .operation = "store", .timeout = limit, .where = {}});
    } catch (const PeerLost&) {
      if (elastic_) elastic_->check(context());  // names the lost rank
      throw;
    }
  }
  /// done: is given how long it may take.
  template <class Done>
  static void wait_until(const std::vector<std::string>& keys, milliseconds timeout, Done done) {
    using Clock = lockstep::detail::JobClock;
    const auto end = Clock::now() + std::min<milliseconds>(timeout, std::chrono::hours(876'000));
    bool is_done = false;
    nn::detail::poll_until(end, [&] {
      const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
      try {
        is_done = done(std::max(left, milliseconds(1)));
      } catch (const TimeoutError&) {  // the launcher has not answered by then
      }
      return is_done;
    });
    TORCH_CHECK_WITH(
        DistStoreError, is_done,
        fmt::format("wait timeout after {} ms, keys: {}", timeout.count(), fmt::join(keys, ", ")));
  }

  const base::ForkGuard process_;
  const int socket_, rank_;
  const std::uint64_t world_;
  const std::shared_ptr<const shared::Elastic> elastic_;  // null: not elastic
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_launcher_store() {
  const internal::Session* const session = internal::session();
  if (session == nullptr || session->is_forked_child() || !session->world().segment) return {};
  const internal::World& world = session->world();
  const int socket = shared::launcher_socket(*world.segment);
  if (socket < 0) return {};
  return c10::make_intrusive<LauncherStore>(socket, world.rank, world.regrouped.generation,
                                            session->world_group().timeout(), session->elastic());
}

}  // namespace lockstep::backend
