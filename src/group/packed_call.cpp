#include <cerrno>
#include <cstddef>
#include <lockstep/engine.hpp>
#include <lockstep/error.hpp>
#include <memory>
#include <new>
#include <span>

#include "base/bytes.hpp"

namespace lockstep {
namespace {

using base::bytes;
using base::copy_bytes;

/// A list call for an engine that takes one contiguous buffer: packs the parts, and unpacks the
/// results, unless they are contiguous already.
class PackedCall {
 public:
  explicit PackedCall(const Call& call) : call_(call), packed_(call) {
    packed_.ins = {};
    packed_.outs = {};
    if (!call.ins.empty()) packed_.in = block_of(call.ins, in_);
    if (!call.outs.empty()) packed_.out = block_of(call.outs, out_);
  }

  void run(Engine& engine) const {
    if (in_) {
      each(call_.ins, [&](const void* part, std::size_t begin, std::size_t n_bytes) {
        copy_bytes(in_.get() + begin, part, n_bytes);
      });
    }
    engine.run(packed_);
    if (out_) {
      each(call_.outs, [&](void* part, std::size_t begin, std::size_t n_bytes) {
        copy_bytes(part, out_.get() + begin, n_bytes);
      });
    }
  }

 private:
  /// use(address, bytes before it, bytes) of each part; returns the bytes of all.
  template <class Pointer, class Use>
  std::size_t each(std::span<Pointer const> parts, Use use) const {
    std::size_t begin = 0;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const std::size_t count = call_.counts.empty() ? call_.count : call_.counts[r];
      use(parts[r], begin, count * size_of(call_.dtype));
      begin += count * size_of(call_.dtype);
    }
    return begin;
  }
  template <class Pointer>
  Pointer block_of(std::span<Pointer const> parts, std::unique_ptr<std::byte[]>& block) const {
    bool is_block = parts.front() != nullptr;
    const std::size_t n_bytes =
        each(parts, [&](const void* part, std::size_t begin, std::size_t n) {
          is_block = is_block && (n == 0 || part == bytes(parts.front()) + begin);
        });
    if (is_block) return parts.front();
    block = std::make_unique_for_overwrite<std::byte[]>(n_bytes);
    return block.get();
  }

  const Call& call_;
  Call packed_;
  std::unique_ptr<std::byte[]> in_, out_;
};

PackedCall pack_call(Engine& engine, const Call& call) try {
  return PackedCall(call);
} catch (const std::bad_alloc&) {
  const SystemError error(context_of(call, engine.rank()), ENOMEM,
                          "no memory to pack the parts of a list");
  engine.end_with(error);  // the peers wait in this call
  throw SystemError(error);
}

}  // namespace

void Engine::run_lists(const Call& call) { pack_call(*this, call).run(*this); }

}  // namespace lockstep
