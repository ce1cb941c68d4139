#pragma once

#include <lockstep/engine.hpp>
#include <memory>

namespace example {

/// The memory that the ranks of one group share.
struct Meeting;
std::shared_ptr<Meeting> make_meeting(int n_ranks);

/// An engine whose ranks are threads of this process: each reads its peers' buffers directly.
std::unique_ptr<lockstep::Engine> join(std::shared_ptr<Meeting> meeting, int rank);

}  // namespace example
