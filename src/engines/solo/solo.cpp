#include "engines/solo/solo.hpp"

#include <cstring>
#include <deque>
#include <lockstep/error.hpp>
#include <vector>

namespace lockstep::solo {
namespace {

class Buffer final : public SharedMemory {
 public:
  explicit Buffer(std::size_t n_bytes) : bytes_(n_bytes) {}
  std::byte* data() const noexcept override { return bytes_.data(); }

 private:
  mutable std::vector<std::byte> bytes_;
};

class SoloEngine final : public Engine {
 public:
  std::string_view name() const noexcept override { return "solo"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }

  void run(const Call& call) override {
    switch (call.op) {
      case Op::barrier:
      case Op::all_reduce:  // of one value, every reduction is that value
      case Op::reduce:
      case Op::broadcast:
      case Op::split:
      case Op::allocate: break;
      case Op::all_gather:
      case Op::gather:
      case Op::scatter:
      case Op::reduce_scatter:
      case Op::all_to_all:
        if (call.count > 0 && call.in != call.out) {
          std::memcpy(call.out, call.in, call.count * size_of(call.dtype));
        }
        break;
      case Op::send: send(call); break;
      case Op::recv: receive(call); break;
    }
  }

  std::unique_ptr<Engine> split(const Call&, int, int) override { return make(); }
  std::unique_ptr<SharedMemory> allocate(const Call& call) override {
    return std::make_unique<Buffer>(call.count);
  }
  void leave(std::string_view) noexcept override {}

 private:
  struct Message {
    DType dtype;
    std::size_t count;
    std::vector<std::byte> bytes;
  };

  void send(const Call& call) {
    const auto* data = static_cast<const std::byte*>(call.in);
    sent_.push_back({call.dtype, call.count, {data, data + call.count * size_of(call.dtype)}});
  }

  void receive(const Call& call) {
    if (sent_.empty()) {
      throw UsageError(context_of(call, 0),
                       "the only rank receives from itself what it has not sent; send first");
    }
    const Message& message = sent_.front();
    if (message.dtype != call.dtype || message.count != call.count) {
      throw MismatchError(context_of(call, 0), "sent " + std::to_string(message.count) +
                                                   " elements of " +
                                                   std::string(name_of(message.dtype)) +
                                                   ", received " + std::to_string(call.count) +
                                                   " of " + std::string(name_of(call.dtype)));
    }
    if (!message.bytes.empty()) std::memcpy(call.out, message.bytes.data(), message.bytes.size());
    sent_.pop_front();
  }

  std::deque<Message> sent_;
};

}  // namespace

std::unique_ptr<Engine> make() { return std::make_unique<SoloEngine>(); }

}  // namespace lockstep::solo
