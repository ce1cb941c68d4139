#pragma once

#include <exception>
#include <lockstep/sync_master.hpp>
#include <memory>

#include "nn/batch_norm/layer_steps.hpp"

namespace lockstep::nn {
namespace detail {

/// One replica's end of the exchange of one SyncBatchNorm.
class ReplicaLink {
 public:
  struct Message {
    BatchNormPiece piece;   ///< with its autograd history
    Activation x;           ///< of its input
    at::Tensor statistics;  ///< of it
    const BatchNormSettings* settings;
  };
  struct Reply {
    at::Tensor output;       ///< to be filled, with its autograd history
    at::Tensor for_kernels;  ///< the statistics
    bool nonfinite;          ///< what finish_statistics returned
  };
  using Master = SyncMaster<Message, Reply>;
  using Pipe = SlavePipe<Message, Reply>;

  /// Copy 0 creates a new master each time, so no round waits for replicas of an earlier batch.
  /// Throws UsageError if copy 0 has not joined yet.
  static std::shared_ptr<ReplicaLink> join(CallbackContext& context, int copy_id);

  explicit ReplicaLink(std::shared_ptr<Master> master) : master_(std::move(master)) {}
  explicit ReplicaLink(Pipe pipe) : pipe_(std::move(pipe)) {}

  /// The master's replicas are gone, or there were none.
  bool is_alone() const { return master_ && master_->nr_slaves() == 0; }
  bool is_master() const { return master_ != nullptr; }
  Reply exchange(const Message& message) const;
  void fail(const std::exception_ptr& error) const;

 private:
  std::shared_ptr<Master> master_;  // of copy 0; the others have the pipe
  mutable Pipe pipe_;
};

}  // namespace detail

/// Over the batches of all replicas of all ranks. `record` must have its settings; sets nonfinite.
at::Tensor replicated_batch_norm(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, BatchNormRecord& record,
                                 const detail::ReplicaLink& replica);

}  // namespace lockstep::nn
