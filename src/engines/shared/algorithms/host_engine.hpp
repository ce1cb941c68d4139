#pragma once

#include <iterator>
#include <lockstep/engine.hpp>
#include <memory>
#include <span>
#include <vector>

#include "group/native_engine.hpp"
#include "record/recorder.hpp"

namespace lockstep::shared {

class TaggedMessages;

/// What the shared engine does beyond the contract of a backend, for the parts of the library that
/// use it by name. bench/growth simulates it.
class HostEngine : public internal::NativeEngine {
 public:
  std::unique_ptr<Engine> split(const Call& call, int color, int key) final {
    return split_host(call, color, key);
  }
  /// See Engine::split.
  virtual std::unique_ptr<HostEngine> split_host(const Call& call, int color, int key) = 0;
  std::vector<std::unique_ptr<Engine>> divide(const Call& call, std::span<const int> counts) final {
    auto engines = divide_host(call, counts);
    return {std::make_move_iterator(engines.begin()), std::make_move_iterator(engines.end())};
  }
  /// See NativeEngine::divide.
  virtual std::vector<std::unique_ptr<HostEngine>> divide_host(const Call& call,
                                                               std::span<const int> counts) = 0;

  /// Writes the rank's flight record, in memory that the segment's other processes can read and
  /// that outlives the rank.
  virtual std::shared_ptr<internal::Recorder> recorder() const noexcept = 0;

  /// Collective. Sends and receives with tags between the ranks of this engine, which must outlive
  /// the result; null on all ranks if one of them may not access another's memory
  /// (process_vm_readv).
  virtual std::shared_ptr<TaggedMessages> make_messages(const Call& call) = 0;
};

/// The engines of n ranks, each for a thread of this process.
std::vector<std::unique_ptr<HostEngine>> ranks_of_threads(int n);

}  // namespace lockstep::shared
