#include <fmt/format.h>

#include <lockstep/error.hpp>
#include <string_view>
#include <utility>

#include "group/failure.hpp"
#include "group/list_calls.hpp"
#include "nn/batch_norm/layer_steps.hpp"
#include "nn/error.hpp"
#include "nn/tensors/hash.hpp"

namespace lockstep::nn {

using at::Tensor;

namespace {

void check_state(const char* name, const Tensor& state, const Tensor& input,
                 std::int64_t num_features, const Layer& layer) {
  if (!state.defined()) return;
  const bool type_fits = state.scalar_type() == input.scalar_type() ||
                         (is_16_bit(input) && state.scalar_type() == at::kFloat);
  if (!type_fits || state.device() != input.device() || state.dim() != 1 ||
      state.size(0) != num_features) {
    throw UsageError(
        layer.context(kForward),
        fmt::format("expected {} to be a {}{} tensor of {} elements on {}, as the input; got {} of "
                    "{} on {}: convert the module or the input with to()",
                    name, c10::toString(input.scalar_type()), is_16_bit(input) ? " or Float" : "",
                    num_features, input.device().str(), state.toString(), c10::str(state.sizes()),
                    state.device().str()));
  }
}

}  // namespace

bool is_user_code(const std::source_location& where) {
  const std::string_view file = where.file_name();
  if (where.line() == 0 || !(file.ends_with(".h") || file.ends_with(".hpp")))
    return where.line() != 0;
  const auto is_under = [file](const char* folder) {
    return file.find(folder) != std::string_view::npos;
  };
  return !is_under("torch/nn/") && !is_under("/include/c++/") && !is_under("lockstep/nn/");
}

int tag_of(std::string_view identity) {
  return static_cast<int>(hash_of_bytes(identity.data(), identity.size()) & 0x7fffffffU);
}

std::string detail::Layer::name() const {
  if (title) return *title;
  return fmt::format("batch_norm #{} of a SyncBatchNormScope ({} channels)", number, n_channels);
}

ErrorContext detail::Layer::context(std::string_view pass) const {
  return context_of(fmt::format("{} of {}", pass, name()), group, where);
}

void detail::Layer::all_reduce(std::string_view pass, const Elements& message, ReduceOp op) const {
  communicate(pass,
              [&] { internal::ListCalls::all_reduce(group, message, op, tag, Timeout(), where); });
}

void detail::Layer::all_gather(std::string_view pass, const ConstElements& in,
                               const Elements& out) const {
  communicate(pass,
              [&] { internal::ListCalls::all_gather(group, in, out, tag, Timeout(), where); });
}

void detail::Layer::rethrow(std::string_view pass, const Error& error) const {
  ErrorContext mine = context(pass);
  const ErrorContext& its = error.context();
  if (its.operation == mine.operation) throw;  // passed through two of these
  internal::Failure failure = internal::failure_of(error);
  if (its.where.line() == where.line() &&
      std::string_view(its.where.file_name()) == where.file_name()) {
    mine.sequence = its.sequence;
    failure.text = fmt::format("{}: {}", its.operation, failure.text);
  } else {  // what() == context + text()
    const std::string_view what = error.what();
    failure.text =
        fmt::format("{}{}", what.substr(0, what.size() - error.text().size()), failure.text);
  }
  internal::throw_failure(failure, std::move(mine));
}

void refuse_create_graph(std::string_view pass, const Layer& layer, const char* text) {
  if (at::GradMode::is_enabled()) throw UsageError(layer.context(pass), text);
}

void check_batch_norm(const Tensor& input, std::int64_t num_features, const Tensor& weight,
                      const Tensor& bias, const BatchNormSettings& settings) {
  settings.layer.collective().run([&] {
    const auto reject = [&settings](const std::string& text) {
      throw UsageError(settings.layer.context(kForward), text);
    };
    if (input.dim() < 2) {
      reject(fmt::format("expected input of 2 or more dimensions, got {}D", input.dim()));
    }
    if (!(input.is_cpu() || input.is_cuda()) || input.layout() != at::kStrided) {
      reject(fmt::format("expected a dense CPU or CUDA tensor, got {}: move it there with to()",
                         input.toString()));
    }
    if (!input.is_floating_point()) {
      reject(
          fmt::format("expected input of float64, float32, bfloat16 or float16, got {}: convert "
                      "it with to()",
                      c10::toString(input.scalar_type())));
    }
    if (input.size(1) != num_features) {
      reject(fmt::format("expected {} channels, got input size {}", num_features,
                         c10::str(input.sizes())));
    }
    check_state("weight", weight, input, num_features, settings.layer);
    check_state("bias", bias, input, num_features, settings.layer);
    for (const auto& [name, running] : {std::pair("running_mean", settings.running_mean),
                                        std::pair("running_var", settings.running_var)}) {
      check_state(name, running, input, num_features, settings.layer);
      if (!running.defined() || !running._is_zerotensor()) continue;
      reject(
          fmt::format("{} is a zero tensor (_efficientzerotensor), which has no memory for new "
                      "values: pass a clone() of it",
                      name));
    }
  });
}

}  // namespace lockstep::nn
