#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <mutex>
#include <vector>

#include "engines/shared/protocol/tagged_messages.hpp"
#include "nn/tensors/tensor_call.hpp"

namespace lockstep::shared {
class Elastic;
}

namespace lockstep::backend {

/// A collective call.
class CollectiveWork final : public c10d::Work {
 public:
  /// group: ends the call if Ctrl-C ends a wait for it. inputs: for the profiler. results: of the
  /// future.
  CollectiveWork(Group group, c10d::OpType type, const char* title,
                 const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void abort() override { group_.abandon("Work.abort was called"); }

  /// From then on it is completed. Call once. Returns what completes its future, which runs the
  /// callbacks; empty if nobody has asked for one.
  std::function<void()> complete(std::exception_ptr error);

 private:
  void complete_future();

  Group group_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

/// A send or receive between ranks of one host.
class TaggedMessageWork final : public c10d::Work {
 public:
  /// What it moves.
  struct Message {
    at::Tensor tensor;          // of the program
    nn::PreparedCall prepared;  // of it
    c10d::OpType type;
    const char* title;  // of the profiler's event
  };

  TaggedMessageWork(Group group, std::shared_ptr<shared::TaggedMessages> messages, Message message);

  /// Call once. Throws what the call throws.
  void post(const Call& call, int tag);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return request_->source(); }
  std::vector<at::Tensor> result() override { return {message_.tensor}; }
  void abort() override;

 private:
  void complete();

  Group group_;
  std::shared_ptr<shared::TaggedMessages> messages_;
  Message message_;
  std::chrono::milliseconds timeout_{};
  std::shared_ptr<shared::TaggedMessages::Request> request_;
  std::mutex completing_;
};

/// A send or receive over Gloo, with lockstep's errors and the profiler's events.
class GlooMessageWork final : public c10d::Work {
 public:
  using Inner = c10::intrusive_ptr<c10d::Work>;

  /// peer: negative if it may be any.
  GlooMessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type, const char* title,
                  const std::vector<at::Tensor>& tensors);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override { return Work::isCompleted() || inner_->isCompleted(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  void abort() override { inner_->abort(); }

 private:
  Inner inner_;
  ErrorContext context_;
  int peer_;
  std::shared_ptr<const shared::Elastic> elastic_;  // whose generation ends it; null: none
};

}  // namespace lockstep::backend
