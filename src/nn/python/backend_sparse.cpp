#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <numeric>

#include "nn/elements/dense.hpp"
#include "nn/python/backend.hpp"

namespace lockstep::python {
namespace {

/// Every rank's rows, in rank order; their number may differ.
at::Tensor gather_rows(const Group& group, const at::Tensor& rows,
                       const std::vector<std::int64_t>& n_rows, Timeout timeout,
                       std::source_location where) {
  const std::int64_t n_all = std::accumulate(n_rows.begin(), n_rows.end(), std::int64_t{0});
  auto sizes = rows.sizes().vec();
  sizes.front() = n_all;
  const at::Tensor all = at::empty(sizes, rows.options());
  const Elements out = elements_of(all);
  std::vector<std::size_t> counts;
  for (const std::int64_t n : n_rows) {
    counts.push_back(
        n_all == 0 ? 0 : out.count / static_cast<std::size_t>(n_all) * static_cast<std::size_t>(n));
  }
  group.all_gather(elements_of(rows), out, counts, timeout, where);
  return all;
}

}  // namespace

Backend::WorkResult Backend::allreduce_sparse(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  return call(
      "lockstep:all_reduce", c10d::OpType::_ALLREDUCE_SPARSE, options.asyncOp, options.timeout,
      tensors, tensors, [&](const ErrorContext& context) {
        const at::Tensor tensor = only(tensors, context);
        if (!tensor.is_sparse() || !tensor.device().is_cpu()) {
          throw UsageError(context, "takes a sparse COO tensor of the CPU");
        }
        if (options.reduceOp.op_ != c10d::ReduceOp::SUM) {
          throw UsageError(context, "sparse tensors are reduced by SUM only");
        }
        return [tensor](const Group& group, const Site& site) {
          const at::NoGradGuard no_grad;
          const at::Tensor in = tensor.coalesce();
          const at::Tensor indices = nn::dense(in.indices().t());
          const at::Tensor values = nn::dense(in.values());
          const std::int64_t n_own = values.size(0);
          std::vector<std::int64_t> n_rows(static_cast<std::size_t>(group.size()));
          group.all_gather({.data = &n_own, .count = 1, .dtype = DType::i64},
                           {.data = n_rows.data(), .count = n_rows.size(), .dtype = DType::i64},
                           site.timeout, site.where);
          const at::Tensor all_indices =
              gather_rows(group, indices, n_rows, site.timeout, site.where);
          const at::Tensor all_values =
              gather_rows(group, values, n_rows, site.timeout, site.where);
          at::Tensor(tensor).copy_(
              at::sparse_coo_tensor(all_indices.t(), all_values, tensor.sizes()).coalesce());
        };
      });
}

}  // namespace lockstep::python
