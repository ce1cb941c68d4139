#pragma once

#include <lockstep/lockstep.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace lockstep::bench {

/// c10d's Gloo over the default group's ranks on this host. Collective.
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> make_gloo() {
  const bool serves = is_main_process();
  c10d::TCPStoreOptions where;
  where.port = 0;
  where.isServer = serves;
  where.waitWorkers = false;
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (serves) {
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", where);
    where.port = store->getPort();
  }
  broadcast_object(where.port);
  if (!serves) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", where);
  const auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, get_rank(), get_world_size(), options);
}

}  // namespace lockstep::bench
