#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::backend {

/// The store of this rank's world at `lockstep run`, whose keys the launcher of node 0 keeps: it
/// outlives every rank, and its calls end with the generation of an elastic world. Null where
/// another launcher has started the rank, or it is a fork. Of the default group's world as it is
/// now; its keys are those of all that use it, so put a PrefixStore before it. Threads: any.
c10::intrusive_ptr<c10d::Store> make_launcher_store();

}  // namespace lockstep::backend
