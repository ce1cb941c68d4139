#pragma once

#include <exception>
#include <string>

namespace lockstep::base {

/// The text of an exception. `error` is not null.
inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace lockstep::base
