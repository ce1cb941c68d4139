#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <source_location>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <variant>

#include <lockstep/detail/arguments.hpp>
#include <lockstep/group.hpp>
#include <lockstep/nn/assert_in_sync.hpp>
#include <lockstep/world.hpp>

namespace lockstep::nn {

/// Rank 0 saves what `write` puts into the archive (modules, optimizers, samplers: their save) to
/// the file `path`. The replacement is atomic: `path` is always the complete old or new file, also
/// after a crash or power failure (written to `path`.part, synced to disk, then renamed). If `path`
/// is a symbolic link, it stays one, and all this is done to the file that it leads to. The archive
/// is followed by a checksum, which load_checkpoint verifies; torch::load and Python's
/// torch.jit.load can read the file too. Collective; returns on every rank when the file is on
/// disk. The other ranks wait as long as rank 0 is at work: the group's timeout is the limit of
/// each of its steps (`write`, the serialisation, every 16 MiB that reach the disk). If `write` or
/// the file system fails, throws UsageError on every rank with rank 0's reason; `path` is unchanged
/// and the group stays usable.
void save_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::OutputArchive&)>& write,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

/// Every rank calls `read` with the archive in `path`; only rank 0 opens the file. Collective.
/// Throws UsageError on every rank if rank 0 cannot read the file, if it is not a regular file, or
/// if it is damaged (a file of torch::save has no checksum: damage in a tensor is not detected);
/// then what `read` throws, c10::Error as a UsageError.
void load_checkpoint(const std::string& path,
                     const std::function<void(torch::serialize::InputArchive&)>& read,
                     const Group& group = default_group(),
                     std::source_location where = std::source_location::current());

namespace detail {
/// Includes the options (the learning rate), which Optimizer::load omits.
void save_optimizer(const torch::optim::Optimizer& optimizer,
                    torch::serialize::OutputArchive& archive);
void load_optimizer(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

using Number = std::variant<double, std::int64_t, std::uint64_t>;

template <class T>
Number number_of(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_signed_v<T>) {
    return static_cast<std::int64_t>(value);
  } else {
    return static_cast<std::uint64_t>(value);
  }
}

void save_number(const Number& number, torch::serialize::OutputArchive& archive);
/// is_unsigned: whether to take a negative number for a large one if the archive does not tell.
Number load_number(torch::serialize::InputArchive& archive, bool is_unsigned);
[[noreturn]] void throw_does_not_fit(const Number& number, const std::type_info& type,
                                     const Number& lowest, const Number& largest);

/// Throws if a T has no such value.
template <class T>
T number_as(const Number& number) {
  return std::visit(
      [&number](auto from) -> T {
        using From = decltype(from);
        if constexpr (std::is_integral_v<From> || std::is_floating_point_v<T>) {
          const T to = static_cast<T>(from);
          // A long double has every value of these types.
          bool fits = static_cast<long double>(to) == static_cast<long double>(from);
          if constexpr (std::is_floating_point_v<From>) fits = fits || std::isnan(from);
          if (fits) return to;
        }
        using Limits = std::numeric_limits<T>;
        throw_does_not_fit(number, typeid(T), number_of(Limits::lowest()),
                           number_of(Limits::max()));
      },
      number);
}
}  // namespace detail

/// What a part of a training is: a letter in its file.
enum class PartKind : char { module = 'm', optimizer = 'o', number = 'n', object = 's' };

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
      kind_ = PartKind::number;
      save_ = [&part](Out& to) { detail::save_number(detail::number_of(part), to); };
      load_ = [&part](In& from) {
        part = detail::number_as<T>(detail::load_number(from, std::is_unsigned_v<T>));
      };
    } else if constexpr (std::derived_from<T, torch::optim::Optimizer>) {
      kind_ = PartKind::optimizer;
      optimizer_ = &part;
      save_ = [&part](Out& to) { detail::save_optimizer(part, to); };
      load_ = [&part](In& from) { detail::load_optimizer(part, from); };
    } else if constexpr (requires(Out & to, In & from) {
                           part.save(to);
                           part.load(from);
                         }) {
      if constexpr (std::derived_from<T, torch::nn::Module>) {
        kind_ = PartKind::module;
        module_ = &part;
      }
      save_ = [&part](Out& to) { part.save(to); };
      load_ = [&part](In& from) { part.load(from); };
    } else if constexpr (detail::HasModule<T>) {
      kind_ = PartKind::module;
      module_ = &detail::module_of(part);
      save_ = [&part](Out& to) { detail::module_of(part).save(to); };
      load_ = [&part](In& from) {
        const_cast<torch::nn::Module&>(detail::module_of(part)).load(from);
      };
    } else {
      static_assert(lockstep::detail::kNever<T>,
                    "lockstep: a part of a training is a module (or a ModuleHolder, shared_ptr or "
                    "DistributedDataParallel of one), an optimizer, a number, or an object with "
                    "save(OutputArchive&) and load(InputArchive&). Give the module of a tensor; "
                    "an nn::SavedScheduler of a learning rate scheduler");
    }
  }
  PartKind kind() const { return kind_; }
  /// Null if it is not one.
  const torch::nn::Module* module() const { return module_; }
  const torch::optim::Optimizer* optimizer() const { return optimizer_; }
  void save(torch::serialize::OutputArchive& to) const { save_(to); }
  void load(torch::serialize::InputArchive& from) const { load_(from); }

 private:
  PartKind kind_ = PartKind::object;
  const torch::nn::Module* module_ = nullptr;
  const torch::optim::Optimizer* optimizer_ = nullptr;
  std::function<void(torch::serialize::OutputArchive&)> save_;
  std::function<void(torch::serialize::InputArchive&)> load_;
};

/// A learning rate scheduler of libtorch that is a part of a training: the rates are options of its
/// optimizer, and this saves the count of its steps:
///     nn::SavedScheduler<torch::optim::StepLR> schedule(optimizer, /*step_size=*/30);
/// Not ReduceLROnPlateauScheduler, which keeps its state to itself.
template <std::derived_from<torch::optim::LRScheduler> Scheduler>
class SavedScheduler : public Scheduler {
 public:
  using Scheduler::Scheduler;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("step_count", c10::IValue(static_cast<std::int64_t>(this->step_count_)));
  }
  void load(torch::serialize::InputArchive& archive) {
    c10::IValue count;
    archive.read("step_count", count);
    this->step_count_ = static_cast<unsigned>(count.toInt());
  }
};

/// Rank 0 saves the parts, see save_checkpoint:
///     save_training("training.pt", {net, optimizer, sampler, epoch});
/// and every rank loads them from rank 0's file, see load_checkpoint:
///     load_training("training.pt", {net, optimizer, sampler, epoch});
/// Both are collective. If all ranks have the same state (assert_in_sync), training resumes bitwise
/// identically; learning rates are part of the optimizer. Rank 0 first gathers the state of a
/// ZeroRedundancyOptimizer; the file is that of the plain optimizer, for any number of ranks.
/// load_training throws UsageError on every rank, and then no part is changed on any, if the file
/// does not have these parts in this order, or if on one rank a parameter or buffer has another
/// name, shape or type; an optimizer is of another kind or has other parameters, or has them in
/// another order; a number does not fit its type; or a part's own load throws. To be able to undo,
/// it keeps a copy of the parts while it loads.
void save_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group = default_group(),
                   std::source_location where = std::source_location::current());
void load_training(const std::string& path, std::initializer_list<TrainingPart> parts,
                   const Group& group = default_group(),
                   std::source_location where = std::source_location::current());

}  // namespace lockstep::nn
