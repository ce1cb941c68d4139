#include <exception>
#include <utility>

#include <lockstep/error.hpp>
#include <lockstep/sync_master.hpp>

#include "sync/rendezvous.hpp"

namespace lockstep::detail {
namespace {

[[noreturn]] void reject(const char* operation, int id, std::source_location where,
                         const char* text) {
  throw UsageError({.operation = operation, .group = {}, .rank = id, .sequence = 0, .where = where},
                   text);
}

}  // namespace

SlaveEnd::SlaveEnd(std::shared_ptr<Rendezvous> rendezvous,
                   std::shared_ptr<Participant> participant) noexcept
    : rendezvous_(std::move(rendezvous)), participant_(std::move(participant)) {}

SlaveEnd& SlaveEnd::operator=(SlaveEnd&& other) noexcept {
  SlaveEnd old(std::move(*this));  // leaves at scope exit
  rendezvous_ = std::move(other.rendezvous_);
  participant_ = std::move(other.participant_);
  return *this;
}

SlaveEnd::~SlaveEnd() {
  if (participant_)
    rendezvous_->leave(*participant_, /*by_exception=*/std::uncaught_exceptions() > 0);
}

int SlaveEnd::id() const noexcept { return participant_ ? participant_->id : -1; }

ErasedValue SlaveEnd::run(ErasedValue message, Timeout timeout, std::source_location where) {
  if (!participant_)
    reject("run_slave", -1, where, "this SlavePipe is empty; use one returned by register_slave");
  return rendezvous_->run_slave(*participant_, std::move(message), timeout, where);
}

void SlaveEnd::fail(const std::exception_ptr& error, std::source_location where) {
  if (!participant_) reject("SlavePipe::fail", -1, where, "this SlavePipe is empty");
  rendezvous_->fail(*participant_, error, where);
}

MasterEnd::MasterEnd(Callback callback, std::chrono::milliseconds timeout,
                     std::source_location where)
    : callback_(std::move(callback)),
      timeout_(timeout),
      rendezvous_(std::make_shared<Rendezvous>(timeout)) {
  if (!callback_) reject("SyncMaster", kMasterId, where, "the callback is empty; give a function");
}

MasterEnd::~MasterEnd() {
  const bool by_exception = std::uncaught_exceptions() > 0;
  current()->close({.kind = by_exception ? Failure::Kind::peer_failed : Failure::Kind::peer_lost,
                    .text = by_exception ? "the master left: its SyncMaster was destroyed while an "
                                           "exception unwound its thread"
                                         : "the master left: its SyncMaster was destroyed"});
}

SlaveEnd MasterEnd::register_slave(const char* operation, int id, std::source_location where) {
  const std::scoped_lock lock(mutex_);
  if (rendezvous_->is_used()) start_new_registration(operation, where);
  return SlaveEnd(rendezvous_, rendezvous_->add(operation, id, where));
}

void MasterEnd::clear_slaves(std::source_location where) {
  const std::scoped_lock lock(mutex_);
  start_new_registration("clear_slaves", where);
}

ErasedValue MasterEnd::run(ErasedValue message, Timeout timeout, std::source_location where) {
  return current()->run_master(std::move(message), callback_, timeout, where);
}

void MasterEnd::fail(const std::exception_ptr& error, std::source_location where) {
  const auto rendezvous = current();
  rendezvous->fail(rendezvous->master(), error, where);
}

int MasterEnd::nr_slaves() const { return current()->n_slaves(); }

std::shared_ptr<Rendezvous> MasterEnd::current() const {
  const std::scoped_lock lock(mutex_);
  return rendezvous_;
}

void MasterEnd::start_new_registration(const char* operation, std::source_location where) {
  auto next = std::make_shared<Rendezvous>(timeout_);
  if (!rendezvous_->close(
          {.kind = Failure::Kind::peer_lost,
           .text = "the master has begun a new registration since this pipe was made; use "
                   "the pipe of the latest register_slave"})) {
    reject(operation, kMasterId, where,
           "a run_master is under way; register slaves before it starts or after it returned");
  }
  rendezvous_ = std::move(next);
}

}  // namespace lockstep::detail
