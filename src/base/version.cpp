#include "base/version.hpp"

namespace lockstep::base {

std::string_view version() noexcept { return LOCKSTEP_VERSION; }

}  // namespace lockstep::base
