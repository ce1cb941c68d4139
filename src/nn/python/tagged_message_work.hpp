#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <lockstep/engine.hpp>
#include <lockstep/group.hpp>
#include <memory>
#include <mutex>
#include <vector>

#include "engines/shared/protocol/tagged_messages.hpp"

namespace lockstep::python {

/// A send or receive between ranks of one host.
class TaggedMessageWork final : public c10d::Work {
 public:
  /// What it moves.
  struct Message {
    at::Tensor tensor;    // of the program
    at::Tensor in_place;  // contiguous: the same, or a copy
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

}  // namespace lockstep::python
