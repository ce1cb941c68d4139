#include <lockstep/nn/functional.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <lockstep/detail/collective.hpp>
#include <lockstep/detail/time_limit.hpp>
#include <lockstep/error.hpp>
#include <lockstep/nn/tensor_ops.hpp>
#include <map>
#include <numeric>
#include <string>

#include "base/hash.hpp"
#include "group/mismatch.hpp"
#include "nn/error.hpp"
#include "nn/layer.hpp"
#include "nn/tensors/tensor_call.hpp"

/// Each operation is a node of the graph. Before its data the ranks exchange a header, by which
/// they find out that they make the same call, and need its gradient on all ranks or on none.
namespace lockstep::nn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Kind : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  replicate,
  reduce_replicated,
};

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {
      // in the order of Kind
      "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
      "reduce",     "gather",     "scatter",        "replicate",  "reduce_replicated"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Kind::reduce_replicated) + 1);
  return kNames[static_cast<std::size_t>(kind)];
}

/// Only root's tensors have a part in the result.
bool is_from_root(Kind kind) { return kind == Kind::broadcast || kind == Kind::scatter; }
bool takes_parts(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all || kind == Kind::scatter;
}

enum class Gradient : std::uint8_t {
  none,  ///< not needed, or not wanted (NoGradGuard)
  needed,
  as_root  ///< of a tensor without a part in the result
};

constexpr std::size_t kMaxDims = 10;

/// What ranks compare of a call. Without padding.
struct Header {
  std::int64_t number = 0;       ///< of this rank's calls; all take rank 0's. Not compared.
  std::int64_t backward_of = 0;  ///< the number of the forward; 0: this is one
  /// Of all parts, if there are parts: a hash in the first.
  std::array<std::int64_t, kMaxDims> sizes{};
  std::int32_t root = -1;
  std::uint32_t line = 0;  ///< not compared: ranks may run different programs
  Kind kind{};
  std::uint8_t reduce = 0, type = 0, n_dims = 0;
  Gradient gradient{};
  bool has_tensors = false;
  std::array<std::uint8_t, 2> unused{};
};
static_assert(sizeof(Header) == 112);

/// One call: of the program, or of a backward.
struct FunctionalCall : torch::CustomClassHolder {
  Kind kind{};
  ReduceOp op = ReduceOp::sum;
  int root = -1;
  Layer layer{};  ///< its title is the name of the program's call
  std::string_view pass = kForward;
  lockstep::detail::TimeLimit limit{Timeout()};
  std::int64_t backward_of = 0;
  std::int64_t number = 0;      ///< from the header
  std::vector<Header> headers;  ///< of all ranks

  const Group& group() const { return layer.group; }
  bool is_root() const { return group().rank() == root; }
  ErrorContext context() const { return layer.context(pass); }
  const Header& header_of(int rank) const { return headers[static_cast<std::size_t>(rank)]; }
  bool needs_gradient() const {
    return header_of(is_from_root(kind) ? root : group().rank()).gradient == Gradient::needed;
  }
};
using CallPtr = c10::intrusive_ptr<FunctionalCall>;

// --- the header ----------------------------------------------------------------------------------

void check_arguments(const FunctionalCall& call, const variable_list& inputs) {
  const auto reject = [&](const std::string& text) { throw UsageError(call.context(), text); };
  const Group& group = call.group();
  const bool is_to_root = call.kind == Kind::reduce || call.kind == Kind::gather;
  if (is_from_root(call.kind) || is_to_root) {
    const std::string text = why_no_rank(is_to_root ? "dst" : "src", call.root, group);
    if (!text.empty()) reject(text);
  }
  if (call.op != ReduceOp::sum && call.op != ReduceOp::mean) {
    reject(fmt::format("the reduction is {}; those with a gradient are sum and mean",
                       lockstep::name_of(call.op)));
  }
  const bool may_be_empty = call.kind == Kind::scatter && !call.is_root();
  if (takes_parts(call.kind) && !(may_be_empty && inputs.empty())) {
    check_parts(inputs, inputs.empty() ? Tensor() : inputs.front(), group, kOperations,
                call.context(), /*are_rows=*/call.kind == Kind::reduce_scatter);
  }
  for (const Tensor& input : inputs) {
    check_tensor(input, kOperations, call.context());
    if (input.dim() > static_cast<std::int64_t>(kMaxDims)) {
      reject(
          fmt::format("a tensor of {} dimensions; at most {} are possible", input.dim(), kMaxDims));
    }
  }
  const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce ||
                       call.kind == Kind::reduce_scatter || call.kind == Kind::reduce_replicated;
  if (reduces) check_reduction(inputs.front().scalar_type(), call.op, call.context());
}

Header header_of(const FunctionalCall& call, const variable_list& inputs) {
  static std::atomic<std::int64_t> n_calls{0};
  Header header{.number = ++n_calls,
                .backward_of = call.backward_of,
                .root = call.root,
                .line = call.layer.where.line(),
                .kind = call.kind,
                .reduce = static_cast<std::uint8_t>(call.op)};
  if (at::GradMode::is_enabled()) {
    const bool has_part = !is_from_root(call.kind) || call.is_root();
    // In a backward with create_graph the gradient that one rank gets may be constant, and that of
    // another not.
    const bool is_needed =
        call.backward_of != 0 || std::ranges::any_of(inputs, &Tensor::requires_grad);
    header.gradient = !has_part ? Gradient::as_root : is_needed ? Gradient::needed : Gradient::none;
  }
  if (inputs.empty()) return header;
  header.has_tensors = true;
  header.type = static_cast<std::uint8_t>(inputs.front().scalar_type());
  header.n_dims = static_cast<std::uint8_t>(inputs.front().dim());
  if (call.kind == Kind::reduce_scatter) {
    for (const Tensor& input : inputs) {
      const auto hash =
          base::hash_of_bytes(input.sizes().data(), input.sizes().size() * sizeof(std::int64_t));
      header.sizes[0] = static_cast<std::int64_t>(
          hash + static_cast<std::uint64_t>(header.sizes[0]) * 0x9e3779b97f4a7c15ULL);
    }
  } else {
    std::ranges::copy(inputs.front().sizes(), header.sizes.begin());
  }
  return header;
}

/// What must be equal on all ranks.
Header comparable(Header header, const Header& of_root) {
  header.number = header.line = 0;
  if (header.kind == Kind::all_gather && header.n_dims > 0) header.sizes[0] = 0;
  if (header.kind == Kind::scatter && !header.has_tensors) {
    header.sizes = of_root.sizes;
    header.type = of_root.type;
    header.n_dims = of_root.n_dims;
    header.has_tensors = of_root.has_tensors;
  }
  if (header.gradient == Gradient::as_root) header.gradient = of_root.gradient;
  return header;
}

std::string text_of(const Header& header) {
  std::string text =
      fmt::format("{}{}", header.backward_of != 0 ? "backward by " : "", name_of(header.kind));
  const auto type = static_cast<at::ScalarType>(header.type);
  if (header.kind == Kind::reduce_scatter) {
    fmt::format_to(std::back_inserter(text), " of {} parts (a hash of their shapes: {:04x})",
                   c10::toString(type), header.sizes[0] & 0xffff);
  } else if (header.has_tensors) {
    const at::IntArrayRef sizes(header.sizes.data(), header.n_dims);
    fmt::format_to(std::back_inserter(text), " of {} {}", c10::toString(type), c10::str(sizes));
  }
  if (header.root >= 0) fmt::format_to(std::back_inserter(text), ", root {}", header.root);
  if (static_cast<ReduceOp>(header.reduce) != ReduceOp::sum) text += ", mean";
  if (header.backward_of != 0) {
    fmt::format_to(std::back_inserter(text), ", of forward #{}{}", header.backward_of,
                   header.gradient == Gradient::none ? "" : ", with create_graph");
  } else {
    text += header.gradient == Gradient::needed    ? ", needs a gradient"
            : header.gradient == Gradient::as_root ? ""
                                                   : ", needs no gradient";
  }
  return fmt::format("{}, line {}", text, header.line);
}

[[noreturn]] void throw_mismatch(const FunctionalCall& call) {
  std::map<std::string, std::vector<int>> ranks_by_text;
  for (std::size_t r = 0; r < call.headers.size(); ++r) {
    ranks_by_text[text_of(call.headers[r])].push_back(static_cast<int>(r));
  }
  const auto most = std::ranges::max_element(ranks_by_text, {},
                                             [](const auto& entry) { return entry.second.size(); });
  ErrorContext context = call.context();
  std::string text =
      "the ranks made different calls, or need a gradient on some ranks only; all ranks must make "
      "the same calls in the same order";
  for (const auto& [call_text, ranks] : ranks_by_text) {
    fmt::format_to(std::back_inserter(text), "\n  rank{} {}: {}", ranks.size() > 1 ? "s" : "",
                   internal::list_of(ranks), call_text);
    // Where two ranks disagree nobody knows which one is wrong.
    if (2 * most->second.size() > call.headers.size() && call_text != most->first) {
      context.peers.insert(context.peers.end(), ranks.begin(), ranks.end());
    }
  }
  throw MismatchError(std::move(context), text);
}

/// Exchanges the headers and compares them. Throws the same MismatchError on all ranks.
void compare(FunctionalCall& call, const variable_list& inputs) {
  const Header mine = header_of(call, inputs);
  const auto n = static_cast<std::size_t>(call.group().size());
  call.headers.resize(n);
  call.layer.communicate(call.pass, [&] {
    call.group().all_gather({&mine, sizeof mine, DType::u8},
                            {call.headers.data(), n * sizeof mine, DType::u8}, call.limit.timeout(),
                            call.layer.where);
  });
  call.number = call.headers.front().number;
  const Header& of_root = call.header_of(std::max(call.root, 0));
  const Header expected = comparable(of_root, of_root);
  for (const Header& header : call.headers) {
    const Header other = comparable(header, of_root);
    if (std::memcmp(&other, &expected, sizeof other) != 0) throw_mismatch(call);
  }
}

// --- forward -------------------------------------------------------------------------------------

Tensor zeros_of(const Header& header, at::Device device) {
  return at::zeros(at::IntArrayRef(header.sizes.data(), header.n_dims),
                   at::TensorOptions(device).dtype(static_cast<at::ScalarType>(header.type)));
}

/// Of the ranks' rows, of which each has as many as its header says.
variable_list gather_rows(const FunctionalCall& call, const Tensor& data) {
  const Group& group = call.group();
  const bool are_equal = std::ranges::all_of(
      call.headers, [&](const Header& header) { return header.sizes == call.headers[0].sizes; });
  if (are_equal) return all_gather(data, group, call.limit.timeout(), call.layer.where);
  std::vector<std::int64_t> n_rows;
  for (const Header& header : call.headers) n_rows.push_back(header.sizes[0]);
  return all_gather_rows(data, n_rows, kOperations, group, call.limit.timeout(), call.context())
      .to(data.device())
      .split_with_sizes(n_rows);
}

/// Pads parts of different first sizes: the group has no reduce_scatter of such.
Tensor reduce_and_scatter(const FunctionalCall& call, const variable_list& parts) {
  const Tensor& own = parts[static_cast<std::size_t>(call.group().rank())];
  const auto reduce = [&](const variable_list& equal, Tensor result) {
    reduce_scatter(result, equal, call.op, call.group(), call.limit.timeout(), call.layer.where);
    return result;
  };
  std::int64_t longest = 0;
  for (const Tensor& part : parts) longest = std::max(longest, part.dim() == 0 ? 0 : part.size(0));
  const bool are_equal = std::ranges::all_of(
      parts, [&](const Tensor& part) { return part.sizes() == parts.front().sizes(); });
  if (are_equal) return reduce(parts, at::empty(own.sizes(), own.options()));
  variable_list padded;
  for (const Tensor& part : parts) {
    std::vector<std::int64_t> sizes = part.sizes().vec();
    sizes[0] = longest;
    padded.push_back(at::zeros(sizes, part.options()));
    padded.back().narrow(0, 0, part.size(0)).copy_(part);
  }
  return reduce(padded, at::empty_like(padded.front())).narrow(0, 0, own.size(0)).clone();
}

variable_list compute(const FunctionalCall& call, const variable_list& inputs) {
  const Group& group = call.group();
  const auto& where = call.layer.where;
  const Timeout timeout = call.limit.timeout();
  const auto copy = [&] { return dense(inputs.front()).clone(at::MemoryFormat::Contiguous); };
  switch (call.kind) {
    case Kind::all_reduce:
    case Kind::reduce_replicated: {
      Tensor result = copy();
      all_reduce(result, call.op, group, timeout, where);
      return {result};
    }
    case Kind::all_gather: return gather_rows(call, inputs.front());
    case Kind::reduce_scatter: return {reduce_and_scatter(call, inputs)};
    case Kind::all_to_all: return all_to_all(inputs, group, timeout, where);
    case Kind::broadcast: {
      Tensor result =
          call.is_root() ? copy() : at::empty_like(inputs.front(), at::MemoryFormat::Contiguous);
      broadcast(result, call.root, group, timeout, where);
      return {result};
    }
    case Kind::reduce: {
      Tensor result = copy();
      reduce(result, call.root, call.op, group, timeout, where);
      return {call.is_root() ? result : result.zero_()};
    }
    case Kind::gather: {
      variable_list all = gather(inputs.front(), call.root, group, timeout, where);
      if (!call.is_root()) {
        for (const Header& header : call.headers)
          all.push_back(zeros_of(header, inputs.front().device()));
      }
      return all;
    }
    case Kind::scatter: {
      const at::Device device = inputs.empty() ? at::Device(at::kCPU) : inputs.front().device();
      Tensor result = zeros_of(call.header_of(call.root), device);
      scatter(result, call.is_root() ? inputs : variable_list(), call.root, group, timeout, where);
      return {result};
    }
    case Kind::replicate: return {inputs.front().clone()};
  }
  return {};
}

variable_list run(CallPtr call, variable_list inputs);

/// A call in the backward of `forward`.
variable_list run_backward(const FunctionalCall& forward, Kind kind, ReduceOp op,
                           variable_list gradients) {
  const auto call = c10::make_intrusive<FunctionalCall>();
  call->kind = kind;
  call->op = op;
  call->root = forward.root;
  call->layer = forward.layer;
  call->pass = kBackward;
  call->backward_of = forward.number;
  return run(call, std::move(gradients));
}

class CollectiveNode : public torch::autograd::Function<CollectiveNode> {
 public:
  /// `tensors`: the inputs, and then perhaps one only for the graph.
  static variable_list forward(AutogradContext* context, at::TensorList tensors,
                               std::size_t n_inputs, const CallPtr& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->saved_data["n_inputs"] = static_cast<std::int64_t>(n_inputs);
    context->saved_data["n_tensors"] = static_cast<std::int64_t>(tensors.size());
    const at::AutoDispatchBelowADInplaceOrView without_history;
    return compute(*call, tensors.slice(0, n_inputs).vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto hold = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const FunctionalCall&>(*hold);
    variable_list all =
        detail::translate_errors_for_torch([&] { return gradients_of_inputs(call, gradients); });
    // Of scatter, where this rank gave no parts.
    all.resize(static_cast<std::size_t>(context->saved_data["n_inputs"].toInt()));
    all.resize(static_cast<std::size_t>(context->saved_data["n_tensors"].toInt()) + 2);
    return all;
  }

 private:
  static variable_list gradients_of_inputs(const FunctionalCall& call,
                                           const variable_list& gradients) {
    const auto run_as = [&](Kind kind, ReduceOp op = ReduceOp::sum) {
      return run_backward(call, kind, op, gradients);
    };
    const auto averaged = [&](variable_list all) {
      if (call.op == ReduceOp::mean) {
        for (Tensor& tensor : all) tensor = tensor / call.group().size();
      }
      return all;
    };
    switch (call.kind) {
      case Kind::all_reduce: return run_as(Kind::all_reduce, call.op);
      case Kind::all_gather: return run_as(Kind::reduce_scatter);
      case Kind::reduce_scatter: return averaged(run_as(Kind::all_gather));
      case Kind::all_to_all: return run_as(Kind::all_to_all);
      case Kind::broadcast: return run_as(Kind::reduce);
      case Kind::reduce: return averaged(run_as(Kind::broadcast));
      case Kind::gather: return run_as(Kind::scatter);
      case Kind::scatter: return run_as(Kind::gather);
      case Kind::replicate: return run_as(Kind::reduce_replicated);
      case Kind::reduce_replicated:
        // The gradient of this identity is a sum.
        return at::GradMode::is_enabled() ? run_as(Kind::replicate) : gradients;
    }
    return {};
  }
};

variable_list run(CallPtr call, variable_list inputs) {
  return call->layer.guard([&] {
    check_arguments(*call, inputs);
    compare(*call, inputs);
    variable_list tensors = inputs;
    // Backward is for all ranks, also where no input needs a gradient, or for none, also where one
    // has requires_grad that has no part in the result.
    if (!call->needs_gradient()) {
      for (Tensor& tensor : tensors) tensor = tensor.detach();
    } else if (std::ranges::none_of(inputs, &Tensor::requires_grad)) {
      tensors.push_back(at::empty({0}, at::kFloat).requires_grad_());
    }
    return call->layer.communicate(call->pass, [&] {
      return CollectiveNode::apply(at::TensorList(tensors), inputs.size(), call);
    });
  });
}

variable_list run_forward(Kind kind, variable_list inputs, int root, ReduceOp op,
                          const Group& group, Timeout timeout, std::source_location where) {
  const auto call = c10::make_intrusive<FunctionalCall>();
  call->kind = kind;
  call->op = op;
  call->root = root;
  call->layer = {
      .group = group,
      .title = std::make_shared<const std::string>(fmt::format("functional::{}", name_of(kind))),
      .where = where};
  call->limit = lockstep::detail::TimeLimit(timeout);
  return run(call, std::move(inputs));
}

}  // namespace

namespace functional {

Tensor all_reduce(const Tensor& data, ReduceOp op, const Group& group, Timeout timeout,
                  std::source_location where) {
  return run_forward(Kind::all_reduce, {data}, -1, op, group, timeout, where).front();
}

std::vector<Tensor> all_gather(const Tensor& data, const Group& group, Timeout timeout,
                               std::source_location where) {
  return run_forward(Kind::all_gather, {data}, -1, ReduceOp::sum, group, timeout, where);
}

Tensor reduce_scatter(const std::vector<Tensor>& parts, ReduceOp op, const Group& group,
                      Timeout timeout, std::source_location where) {
  return run_forward(Kind::reduce_scatter, parts, -1, op, group, timeout, where).front();
}

std::vector<Tensor> all_to_all(const std::vector<Tensor>& parts, const Group& group,
                               Timeout timeout, std::source_location where) {
  return run_forward(Kind::all_to_all, parts, -1, ReduceOp::sum, group, timeout, where);
}

Tensor broadcast(const Tensor& data, int src, const Group& group, Timeout timeout,
                 std::source_location where) {
  return run_forward(Kind::broadcast, {data}, src, ReduceOp::sum, group, timeout, where).front();
}

Tensor reduce(const Tensor& data, int dst, ReduceOp op, const Group& group, Timeout timeout,
              std::source_location where) {
  return run_forward(Kind::reduce, {data}, dst, op, group, timeout, where).front();
}

std::vector<Tensor> gather(const Tensor& data, int dst, const Group& group, Timeout timeout,
                           std::source_location where) {
  return run_forward(Kind::gather, {data}, dst, ReduceOp::sum, group, timeout, where);
}

Tensor scatter(const std::vector<Tensor>& parts, int src, const Group& group, Timeout timeout,
               std::source_location where) {
  return run_forward(Kind::scatter, parts, src, ReduceOp::sum, group, timeout, where).front();
}

Tensor replicate(const Tensor& data, const Group& group, Timeout timeout,
                 std::source_location where) {
  return run_forward(Kind::replicate, {data}, -1, ReduceOp::sum, group, timeout, where).front();
}

Tensor reduce_replicated(const Tensor& data, const Group& group, Timeout timeout,
                         std::source_location where) {
  return run_forward(Kind::reduce_replicated, {data}, -1, ReduceOp::sum, group, timeout, where)
      .front();
}

}  // namespace functional
}  // namespace lockstep::nn
