#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <lockstep/error.hpp>
#include <vector>

namespace lockstep::python {

/// lockstep's error for one of Gloo. peer: negative if it may be any.
std::exception_ptr error_of_message(const std::exception& error, const ErrorContext& context,
                                    int peer);

/// A send or receive of another backend, with lockstep's errors and the profiler's events.
class MessageWork final : public c10d::Work {
 public:
  using Inner = c10::intrusive_ptr<c10d::Work>;

  /// peer: negative if it may be any.
  MessageWork(Inner inner, ErrorContext context, int peer, c10d::OpType type, const char* title,
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
};

}  // namespace lockstep::python
