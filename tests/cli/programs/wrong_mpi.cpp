// An MPI module that is wrong: it changes a bit of what a rank receives in an all_reduce of i32.
// For the rest it is the module that LOCKSTEP_TEST_MPI names.
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <vector>

#include "engines/message/header.hpp"
#include "engines/mpi/mpi_abi.hpp"

namespace {

using lockstep::DType;
using lockstep::Op;
using lockstep::message::EagerMessage;
using lockstep::message::Message;

LockstepMpi right;
const Message* firsts = nullptr;  // the first messages of every call of the last group
std::vector<Message> current;
bool are_firsts = false;
bool is_wrong = false;  // the call whose messages these are

int prepare(void* group, const Message* messages, std::size_t n) {
  firsts = messages;
  return right.transport.prepare(group, messages, n);
}

int begin_wrongly(void* group, const Message* messages, std::size_t n, void** exchange) {
  current.assign(messages, messages + n);
  are_firsts = messages == firsts;
  return right.transport.begin(group, messages, n, exchange);
}

int test_wrongly(void* exchange, std::size_t n_tests, std::int32_t* all_done) {
  const int code = right.transport.test(exchange, n_tests, all_done);
  if (code != 0 || *all_done == 0) return code;
  for (const Message& message : current) {
    if (message.direction != Message::Direction::receive) continue;
    auto* data = static_cast<std::byte*>(message.data);
    if (are_firsts) {
      EagerMessage& first = *static_cast<EagerMessage*>(message.data);
      is_wrong = first.header.op == static_cast<std::uint8_t>(Op::all_reduce) &&
                 first.header.dtype == static_cast<std::uint8_t>(DType::i32);
      data = first.payload.data();
    }
    if (is_wrong) data[0] ^= std::byte{1};
  }
  current.clear();
  return code;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const LockstepMpi* lockstep_mpi() {
  static const LockstepMpi wrong = [] {
    // Open MPI's plugins resolve the library's symbols in the program's global scope.
    void* const library = ::dlopen(std::getenv("LOCKSTEP_TEST_MPI"), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) std::abort();
    right = *reinterpret_cast<const LockstepMpi* (*)()>(::dlsym(library, kLockstepMpiSymbol))();
    LockstepMpi module = right;
    module.transport.prepare = prepare;
    module.transport.begin = begin_wrongly;
    module.transport.test = test_wrongly;
    return module;
  }();
  return &wrong;
}
