#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <source_location>
#include <string>
#include <type_traits>

#include <lockstep/group.hpp>
#include <lockstep/launch.hpp>
#include <lockstep/nn/assert_in_sync.hpp>

namespace lockstep::nn {

/// Rank 0 saves what `write` puts into the archive (modules, optimizers, samplers: their save) to
/// the file `path`. The replacement is atomic: `path` is always the complete old or new file, also
/// after a crash or power failure (written to `path`.part, synced to disk, then renamed). The
/// archive is followed by a checksum, which load_checkpoint verifies; torch::load and Python's
/// torch.jit.load can read the file too. Collective; returns on every rank when the file is on
/// disk. If `write` or the file system fails, throws UsageError on every rank with rank 0's reason;
/// `path` is unchanged and the group stays usable.
void save_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::OutputArchive&)>& write,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

/// Every rank calls `read` with the archive in `path`; only rank 0 opens the file. Collective.
/// Throws UsageError on every rank if rank 0 cannot read the file or finds it damaged (a file of
/// torch::save has no checksum: damage in a tensor is not detected); then what `read` throws.
void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

namespace detail {
/// Includes the options (the learning rate), which Optimizer::load omits.
void save_optimizer(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive);
void load_optimizer(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);
}  // namespace detail

/// A reference to a part of the training state: a module (or a ModuleHolder or shared_ptr to one,
/// or a DistributedDataParallel), an optimizer, a number (such as the epoch), or any object with
/// save(OutputArchive&) and load(InputArchive&), such as a sampler.
class TrainingPart {
 public:
  template <class T>
  requires(!std::same_as<std::remove_const_t<T>, TrainingPart>) TrainingPart(T& part) {
    using Out = torch::serialize::OutputArchive;
    using In = torch::serialize::InputArchive;
    if constexpr (std::is_arithmetic_v<T>) {
      using Number = std::conditional_t<std::is_floating_point_v<T>, double, std::int64_t>;
      kind_ = 'n';
      save_ = [&part](Out& to) { to.write("value", c10::IValue(static_cast<Number>(part))); };
      load_ = [&part](In& from) {
        c10::IValue value;
        from.read("value", value);
        part = static_cast<T>(value.to<Number>());
      };
    } else if constexpr (std::derived_from<T, torch::optim::Optimizer>) {
      kind_ = 'o';
      save_ = [&part](Out& to) { detail::save_optimizer(part, to); };
      load_ = [&part](In& from) { detail::load_optimizer(part, from); };
    } else if constexpr (requires(Out & to, In & from) {
                           part.save(to);
                           part.load(from);
                         }) {
      kind_ = std::derived_from<T, torch::nn::Module> ? 'm' : 's';
      save_ = [&part](Out& to) { part.save(to); };
      load_ = [&part](In& from) { part.load(from); };
    } else {
      kind_ = 'm';
      save_ = [&part](Out& to) { detail::module_of(part).save(to); };
      load_ = [&part](In& from) {
        const_cast<torch::nn::Module&>(detail::module_of(part)).load(from);
      };
    }
  }
  char kind() const { return kind_; }
  void save(torch::serialize::OutputArchive& to) const { save_(to); }
  void load(torch::serialize::InputArchive& from) const { load_(from); }

 private:
  char kind_ = 's';
  std::function<void(torch::serialize::OutputArchive&)> save_;
  std::function<void(torch::serialize::InputArchive&)> load_;
};

/// Rank 0 saves the parts, see save_checkpoint:
///     save_training("training.pt", {net, optimizer, sampler, epoch});
/// and every rank loads them from rank 0's file, see load_checkpoint:
///     load_training("training.pt", {net, optimizer, sampler, epoch});
/// Both are collective. If all ranks have the same state (assert_in_sync), training resumes bitwise
/// identically; learning rates are part of the optimizer. load_training throws UsageError if the
/// file does not have these parts in this order.
void save_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group = default_group(),
                   std::source_location where = std::source_location::current());
void load_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group = default_group(),
                   std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
