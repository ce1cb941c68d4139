#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/detail/collective.hpp>
#include <lockstep/error.hpp>
#include <lockstep/group.hpp>

namespace lockstep::nn {
namespace detail {

/// Names of passes.
inline constexpr std::string_view kForward = "forward", kBackward = "backward",
                                  kSecondBackward = "second backward";

/// One forward of a layer and its backward: their group and how errors name the layer.
struct Layer {
  Group group;
  /// "SyncBatchNorm2d 'layer3.0.bn1'"; null for a call in a SyncBatchNormScope: its name is
  /// formatted only for errors, from its number in the scope and its channels.
  std::shared_ptr<const std::string> title;
  std::source_location where;  ///< the program's line
  std::int64_t number = 0;
  std::int64_t n_channels = 0;
  /// Hash that ranks compare, so that two layers of equal width never exchange statistics. -1: not
  /// compared, as in a scope, where a shadow step of join numbers its calls from 1.
  int tag = -1;
  /// False of a replica other than copy 0, the master, which refuses a call for all of them.
  bool refuses = true;

  std::string name() const;
  /// `pass`: kForward, kBackward or kSecondBackward.
  ErrorContext context(std::string_view pass) const;
  /// Throws an error of the same type that names this layer and includes the text of `error`.
  [[noreturn]] void rethrow(std::string_view pass, const Error& error) const;

  /// See lockstep::detail::Collective. The layer must outlive it.
  lockstep::detail::Collective collective() const {
    return {title ? std::string_view(*title) : std::string_view("batch_norm"), group, where};
  }
  /// Runs a pass, or a part of one: if it throws before its first message, the call is refused.
  template <class F>
  decltype(auto) guard(F&& f) const {
    return refuses ? collective().run(std::forward<F>(f)) : std::forward<F>(f)();
  }

  /// This layer's messages.
  void all_reduce(std::string_view pass, const Elements& message, ReduceOp op) const;
  void all_gather(std::string_view pass, const ConstElements& in, const Elements& out) const;
  void run(std::string_view pass, const Call& call) const;

  /// Runs `message`; its errors are rethrown with the layer's name.
  template <class F>
  auto communicate(std::string_view pass, const F& message) const {
    try {
      return message();
    } catch (const Error& error) {
      rethrow(pass, error);
    }
  }
};

}  // namespace detail
using detail::kBackward;
using detail::kForward;
using detail::kSecondBackward;
using detail::Layer;

/// Throws UsageError, with this text, in a backward with create_graph.
void refuse_create_graph(std::string_view pass, const Layer& layer, const char* text);

/// The tag of a layer with this name, or made at this line; see Layer.
int tag_of(std::string_view identity);

/// Whether a line is in the user's code. False for the library headers that call a module's forward
/// or construct an object in place.
bool is_user_code(const std::source_location& where);

}  // namespace lockstep::nn
