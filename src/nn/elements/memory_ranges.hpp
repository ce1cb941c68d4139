#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "nn/elements/dense.hpp"

/// Entries of a list that share memory. An operation in place on a list takes the values that its
/// entries had before: one that shares memory with another is worked on as a copy. Results that
/// differ cannot share memory.
namespace lockstep::nn {

/// The memory from a tensor's first to its last element. Of a strided tensor that includes gaps.
class MemoryRange {
 public:
  explicit MemoryRange(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 ||
        tensor._is_zerotensor()) {
      return;
    }
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
    begin_ = static_cast<const std::byte*>(tensor.data_ptr());
    end_ = begin_ + static_cast<std::size_t>(last + 1) * tensor.element_size();
  }

  bool overlaps(const MemoryRange& other) const {
    const std::less<const std::byte*> before;
    return before(begin_, other.end_) && before(other.begin_, end_);
  }

 private:
  friend class MemoryRanges;
  const std::byte *begin_ = nullptr, *end_ = nullptr;  // null: no memory
};

/// The memory of tensors that share none.
class MemoryRanges {
 public:
  /// Adds the memory of tensor `number`, unless some of it belongs to another: returns that one's
  /// number.
  std::optional<std::size_t> add(const at::Tensor& tensor, std::size_t number) {
    const MemoryRange range(tensor);
    if (range.begin_ == nullptr) return {};
    if (const auto other = owner_of(range)) return other;
    ranges_.emplace(range.begin_, Owned{range, number});
    return {};
  }
  bool overlap(const at::Tensor& tensor) const { return owner_of(MemoryRange(tensor)).has_value(); }

 private:
  struct Owned {
    MemoryRange range;
    std::size_t number;
  };
  std::optional<std::size_t> owner_of(const MemoryRange& range) const {
    auto next = ranges_.lower_bound(range.end_);  // the ranges before it begin before its end
    if (next == ranges_.begin() || !(--next)->second.range.overlaps(range)) return {};
    return next->second.number;
  }

  std::map<const std::byte*, Owned, std::less<>> ranges_;
};

/// The tensors, or copies of those that share memory with one before them.
inline std::vector<at::Tensor> without_shared_memory(std::vector<at::Tensor> tensors) {
  if (tensors.size() < 2) return tensors;
  MemoryRanges known;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (known.add(tensors[i], i)) tensors[i] = tensors[i].clone();
  }
  return tensors;
}

/// Two results, by number, that share memory.
struct SharedResults {
  std::size_t first, second;
};
/// Those of columns that lie between each other are not found: each is written as a copy.
inline std::optional<SharedResults> find_shared_results(const std::vector<at::Tensor>& results) {
  MemoryRanges known;
  for (std::size_t i = 0; results.size() > 1 && i < results.size(); ++i) {
    const auto other = known.add(results[i], i);
    if (!other) continue;
    const at::Tensor &a = results[*other], &b = results[i];
    if ((is_dense(a) && is_dense(b)) || a.data_ptr() == b.data_ptr())
      return SharedResults{*other, i};
  }
  return {};
}

}  // namespace lockstep::nn
