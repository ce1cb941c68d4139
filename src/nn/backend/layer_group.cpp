#include "nn/backend/layer_group.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "group/mismatch.hpp"
#include "nn/backend/backend.hpp"
#include "nn/gloo_engine/c10d_error.hpp"

namespace lockstep::backend {
namespace {

using c10d::ProcessGroup;
using WeakProcessGroup = c10::weak_intrusive_ptr<ProcessGroup>;

bool has_device(const ProcessGroup& process_group, c10::DeviceType type) {
  return std::ranges::any_of(process_group.getDeviceTypes(),
                             [&](const at::Device& device) { return device.type() == type; });
}

/// tags: each rank's.
std::string text_of_layers(const std::vector<double>& tags) {
  std::map<double, std::vector<int>> ranks;
  for (std::size_t r = 0; r < tags.size(); ++r) ranks[tags[r]].push_back(static_cast<int>(r));
  std::string text = "the ranks are in different layers:";
  for (const auto& [tag, of_layer] : ranks) {
    const auto hash = static_cast<std::int64_t>(tag);
    text += fmt::format(
        "\n  rank {}: {}", internal::list_of(of_layer),
        hash < 0 ? "a batch_norm of a scope" : fmt::format("layer {:04x}", hash & 0xffff));
  }
  return text + "\n  layer: a hash of its name in the module, or of the line that made it";
}

/// Carries what a batch normalisation communicates over a process group.
class ProcessGroupEngine final : public Engine {
 public:
  explicit ProcessGroupEngine(const c10::intrusive_ptr<ProcessGroup>& process_group)
      : process_group_(process_group),
        name_(process_group->getBackendName()),
        rank_(process_group->getRank()),
        size_(process_group->getSize()),
        has_cpu_(has_device(*process_group, at::kCPU)),
        needs_cuda_(!has_cpu_ && has_device(*process_group, at::kCUDA)) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::string_view name() const noexcept override { return name_; }
  void run(const Call& call) override;
  std::unique_ptr<Engine> split(const Call& call, int /*color*/, int /*key*/) override {
    reject(call);
  }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override { reject(call); }
  void refuse(const Refusal& refusal) noexcept override {
    with_own_backend([&](Backend& own) {
      own.refuse(std::string(refusal.operation), refusal.where, std::string(refusal.reason));
    });
  }
  void abandon(std::string_view reason) noexcept override {
    with_own_backend([&](Backend& own) { own.group().abandon(reason); });
  }
  void leave(std::string_view /*failure*/) noexcept override {}

 private:
  [[noreturn]] void reject(const Call& call) const {
    throw UsageError(context_of(call, rank_),
                     fmt::format("a group for batch normalisation has no {}", name_of(call.op)));
  }
  /// lockstep's own backend; null: another's, where c10d has no way to tell the peers.
  Backend* own_backend(ProcessGroup& process_group) const {
    return has_cpu_ ? dynamic_cast<Backend*>(process_group.getBackend(c10::DeviceType::CPU).get())
                    : nullptr;
  }
  template <class F>
  void with_own_backend(F f) noexcept try {
    const auto process_group = process_group_.lock();
    if (Backend* const own = process_group ? own_backend(*process_group) : nullptr) f(*own);
  } catch (const std::exception&) {  // no memory, or no backend after all
  }
  /// Sets asyncOp = false in versions of c10d that have it.
  template <class Options>
  static Options inline_options() {
    Options options;
    if constexpr (requires { options.asyncOp = false; }) options.asyncOp = false;
    return options;
  }

  /// With the tag as one more element, because c10d compares no calls.
  void exchange(ProcessGroup& process_group, const Call& call) const {
    const bool is_sum = call.op == Op::all_reduce;
    if (call.dtype != DType::f64 || (is_sum && call.reduce != ReduceOp::sum)) reject(call);
    const auto count = static_cast<std::int64_t>(call.count);
    const at::Tensor own = at::empty({1, count + 1}, at::kDouble);
    std::copy_n(static_cast<const double*>(call.in), count, own.data_ptr<double>());
    own.data_ptr<double>()[count] = call.root;
    std::vector<at::Tensor> in{needs_cuda_ ? own.to(cuda()) : own};
    at::Tensor out = in.front();
    c10::intrusive_ptr<c10d::Work> work;
    if (is_sum) {
      work = process_group.allreduce(in, inline_options<c10d::AllreduceOptions>());
    } else {
      out = at::empty({size_, count + 1}, out.options());
      std::vector<std::vector<at::Tensor>> outs{out.split(1)};
      work = process_group.allgather(outs, in, inline_options<c10d::AllgatherOptions>());
    }
    if (work) work->wait();
    out = out.cpu();
    const double* row = out.data_ptr<double>();
    std::vector<double> tags;  // a sum's is the sum of them
    for (std::int64_t r = 0; r < out.size(0); ++r, row += count + 1) {
      std::copy_n(row, count, static_cast<double*>(call.out) + r * count);
      tags.push_back(row[count]);
    }
    const double expected = is_sum ? static_cast<double>(call.root) * size_ : call.root;
    if (std::ranges::any_of(tags, [&](double tag) { return tag != expected; })) {
      throw MismatchError(context_of(call, rank_),
                          is_sum ? "the ranks are in different layers" : text_of_layers(tags));
    }
  }

  /// The current one of this thread, as c10d expects of every tensor of a group.
  static at::Device cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice(); }

  [[noreturn]] void fail(const Call& call, const std::exception& error) const {
    const nn::detail::C10dError said = nn::detail::c10d_error(error);
    nn::detail::throw_error(said.kind, lockstep::context_of(call, rank_),
                            fmt::format("{} of torch.distributed failed: {}", name_, said.text));
  }

  const WeakProcessGroup process_group_;
  const std::string name_;
  const int rank_, size_;
  const bool has_cpu_, needs_cuda_;
};

void ProcessGroupEngine::run(const Call& call) {
  if (call.op != Op::all_reduce && (call.op != Op::all_gather || !call.counts.empty())) {
    reject(call);
  }
  const auto process_group = process_group_.lock();
  if (!process_group) {
    throw EngineError(context_of(call, rank_), "the process group has been destroyed");
  }
  if (Backend* const own = own_backend(*process_group)) return own->run_in_order(call);
  // Not of other exceptions: a process group in Python may raise one, KeyboardInterrupt too.
  try {
    exchange(*process_group, call);
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    fail(call, error);
  } catch (const std::runtime_error& error) {
    fail(call, error);
  }
}

}  // namespace

Group layer_group(const c10::intrusive_ptr<ProcessGroup>& process_group) {
  // As the backend names it (_backend.py).
  const std::string name = process_group->getGroupDesc() == "default_pg"
                               ? "world"
                               : "process group " + process_group->getGroupName();
  return {std::make_unique<ProcessGroupEngine>(process_group), name,
          std::chrono::hours(24)};  // not used: the process group's own timeout ends its calls
}

}  // namespace lockstep::backend
