#include "nn/interpreter.hpp"

namespace lockstep::nn {
namespace {

constinit Interpreter current_interpreter;

}  // namespace

const Interpreter& interpreter() noexcept { return current_interpreter; }

void set_interpreter(const Interpreter& interpreter) noexcept { current_interpreter = interpreter; }

}  // namespace lockstep::nn
