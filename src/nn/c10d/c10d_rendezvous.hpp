#pragma once

#include <lockstep/engine.hpp>
#include <memory>
#include <string_view>

#include "nn/c10d/c10d_wire.hpp"
#include "world/session.hpp"

namespace lockstep::nn::detail {

/// Joins the world as its rank, over a new process group of `backend` ("gloo", "nccl"). Rendezvous
/// is a c10d::TCPStore at MASTER_ADDR:MASTER_PORT. Throws UsageError if these are unset or the port
/// is invalid, EngineError with c10d's text, TimeoutError naming the ranks that did not join.
std::shared_ptr<Wire> rendezvous(std::string_view backend, const internal::World& world,
                                 const Call& barrier);

/// Whether this libtorch has the backend.
bool has_backend(std::string_view backend);

}  // namespace lockstep::nn::detail
