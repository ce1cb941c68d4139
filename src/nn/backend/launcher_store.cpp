#include "nn/backend/launcher_store.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstdint>
#include <lockstep/error.hpp>
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
using Kind = StoreRequest::Kind;
using Status = StoreAnswer::Status;
using Bytes = std::vector<std::uint8_t>;
using std::chrono::milliseconds;

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

class LauncherStore final : public c10d::Store {
 public:
  LauncherStore(int socket, int rank, std::uint64_t world, milliseconds timeout)
      : Store(timeout), socket_(socket), rank_(rank), world_(world) {}

  // Not `override`: older versions of c10d have none.
  c10::intrusive_ptr<Store> clone() {
    return c10::make_intrusive<LauncherStore>(socket_, rank_, world_, timeout_);
  }
  void set(const std::string& key, const Bytes& value) override {
    ask({.kind = Kind::set, .words = {key, text_of(value)}});
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return bytes_of(
        ask({.kind = Kind::compare_set, .words = {key, text_of(expected), text_of(desired)}})
            .value);
  }
  Bytes get(const std::string& key) override {
    StoreAnswer answer;
    wait_until({key}, timeout_, [&] {
      answer = ask({.kind = Kind::get, .words = {key}});
      return answer.status != Status::missing;
    });
    return bytes_of(answer.value);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const StoreAnswer answer = ask({.kind = Kind::add, .amount = amount, .words = {key}});
    if (answer.status == Status::not_a_number) {
      throw UsageError({.operation = "store.add", .group = "world", .rank = rank_},
                       fmt::format("the value of '{}' is no number", key));
    }
    return answer.number;
  }
  bool deleteKey(const std::string& key) override {
    return ask({.kind = Kind::remove, .words = {key}}).number > 0;
  }
  bool check(const std::vector<std::string>& keys) override {
    return ask({.kind = Kind::check, .words = keys}).status == Status::done;
  }
  std::int64_t getNumKeys() override { return ask({.kind = Kind::count}).number; }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    wait_until(keys, timeout, [&] { return check(keys); });
  }

 private:
  StoreAnswer ask(const StoreRequest& request) const {
    if (process_.is_forked_child()) {
      throw UsageError({.operation = "store", .group = "world", .rank = rank_},
                       "this process is a fork of a rank; only the rank itself may use the store");
    }
    // Not at the caller's line, for which each look of a wait would take Python's lock.
    return shared::ask_store(
        socket_, rank_, world_, request,
        {.group = "world", .operation = "store", .timeout = timeout_, .where = {}});
  }
  template <class Done>
  void wait_until(const std::vector<std::string>& keys, milliseconds timeout, Done done) const {
    bool is_done = false;
    nn::detail::poll_until(lockstep::detail::JobClock::now() + timeout,
                           [&] { return is_done = done(); });
    TORCH_CHECK_WITH(
        DistStoreError, is_done,
        fmt::format("wait timeout after {} ms, keys: {}", timeout.count(), fmt::join(keys, ", ")));
  }

  const base::ForkGuard process_;
  const int socket_, rank_;
  const std::uint64_t world_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_launcher_store() {
  const internal::Session* const session = internal::session();
  if (session == nullptr || session->is_forked_child() || !session->world().segment) return {};
  const internal::World& world = session->world();
  const int socket = shared::launcher_socket(*world.segment);
  if (socket < 0) return {};
  return c10::make_intrusive<LauncherStore>(socket, world.rank, world.regrouped.generation,
                                            session->world_group().timeout());
}

}  // namespace lockstep::backend
