#pragma once

#include <lockstep/engine.hpp>
#include <memory>

namespace example {

/// The memory that the ranks of one group share.
struct SharedState;
std::shared_ptr<SharedState> make_shared_state(int n_ranks);

/// An engine whose ranks are threads of this process: each reads its peers' buffers directly.
std::unique_ptr<lockstep::Engine> join(std::shared_ptr<SharedState> state, int rank);

}  // namespace example
