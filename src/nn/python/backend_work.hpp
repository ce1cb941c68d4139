#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <functional>
#include <lockstep/group.hpp>
#include <vector>

namespace lockstep::python {

/// What a call of the backend returns.
class BackendWork final : public c10d::Work {
 public:
  /// group: ends the call if Ctrl-C ends a wait for it. inputs: for the profiler. results: of the
  /// future.
  BackendWork(Group group, c10d::OpType type, const char* title,
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

using WorkPtr = c10::intrusive_ptr<BackendWork>;

}  // namespace lockstep::python
