"""The backend "lockstep" of torch.distributed."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from . import _core, _extension, _objects, _world
from .errors import EngineError

_CONNECT_TIME = timedelta(seconds=3)
_CONNECT_ATTEMPTS = 100
_late_threads: list[threading.Thread] = []


def create(options: Any, pg_options: Any) -> Any:
    """A c10d backend for the process group that `options` describes. Collective."""
    ranks = list(options.global_ranks_in_group)  # empty: all, in the default group
    name = f"process group {options.group_id}" if ranks else "world"
    return make(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


def make(store: Any, rank: int, size: int, timeout: Any, name: str, global_ranks: Sequence[int] = ()) -> Any:
    """A c10d backend. Collective.

    global_ranks: of its ranks in the default group; empty for that group itself, and where the ranks need not share one.
    """
    extension = _extension.load()
    backend = extension.make_backend(store=store, rank=rank, size=size, name=name, timeout=timeout, global_ranks=list(global_ranks))
    _world.leave_at_exit(extension.leave_all)
    _patch_monitored_barrier()
    _patch_ddp_logging_data()
    return backend


def leave_all(failure: str) -> None:
    """This rank leaves its groups of torch.distributed: calls of the others raise PeerFailed with that text."""
    _extension.load().leave_all(failure)


def join_world(timeout: _world.Timeout = None) -> str:
    """Joins lockstep's world if the program has not. Returns the host name of rank 0's store, if this is rank 0."""
    if not _core.is_distributed():
        _world.init_dist(timeout=timeout)
    is_near = _world.get_local_size() == _world.get_world_size()
    return "127.0.0.1" if is_near else os.environ.get("MASTER_ADDR", socket.gethostname())


def rendezvous(timeout: timedelta | None = None) -> tuple[Any, int, int]:
    """Store, rank and number of ranks: those of lockstep's world, which this joins if the program has not.

    What init_method="lockstep://" does. Fails on all ranks or on none.
    timeout: of each of its calls; torch's default counts as none.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore
    from torch.distributed.constants import default_pg_timeout

    if timeout == default_pg_timeout:
        timeout = None
    host = join_world(timeout)
    rank, size = _world.get_dist_info()
    if size == 1:
        return HashStore(), 0, 1
    store = _extension.load().launcher_store()
    if store is not None:  # it outlives this world's groups, and those of another call must not see their keys
        part: list[Any] = [uuid.uuid4().hex]
        _objects.broadcast_object_list(part, timeout=timeout)
        return PrefixStore(part[0], store), rank, size
    address: list[Any] = [None]
    if rank == 0:
        try:
            store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            address = [(host, store.port)]
        except RuntimeError as error:  # torch's: the others wait for the address
            address = [str(error)]
    _objects.broadcast_object_list(address, timeout=timeout)
    if isinstance(address[0], str):
        raise EngineError(f"init_process_group: rank 0 cannot open its store at {host}: {address[0]}")
    host, port = address[0]
    # If rank 0 ended, the store would try to connect for its whole timeout: this looks in between.
    failure = ""
    for _ in range(_CONNECT_ATTEMPTS):
        if store is None:
            store, failure = _connect(host, port, size)
        n_failed = sum(_objects.all_gather_object(store is None, timeout=timeout))
        if n_failed == 0:
            return store, rank, size
    raise EngineError(f"init_process_group: {n_failed} of {size} ranks cannot connect to the store of rank 0: {failure}")


def _connect(host: str, port: int, size: int) -> tuple[Any, str]:
    """The store of rank 0, or why not: on a thread, because a rank 0 that is stopped lets it wait for ever."""
    from torch.distributed import TCPStore

    result: list[Any] = [None, "no answer"]

    def connect() -> None:
        try:
            result[:] = TCPStore(host, port, size, timeout=_CONNECT_TIME), ""
        except RuntimeError as error:
            result[1] = str(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(2 * _CONNECT_TIME.total_seconds())
    if thread.is_alive():
        if not _late_threads:
            atexit.register(_join_late_threads)
        _late_threads.append(thread)
    return result[0], result[1]


def _join_late_threads() -> None:
    """An exception of C++ on one of them while Python ends would end the process by SIGABRT.

    TCPStore tries for its timeout, and each try may take as long; one that a stopped rank 0 keeps waiting stays, and
    raises nothing.
    """
    end = time.monotonic() + 3 * _CONNECT_TIME.total_seconds()
    for thread in _late_threads:
        thread.join(max(0.0, end - time.monotonic()))


def make_gloo(store: Any, rank: int, size: int, timeout: Any, is_on_one_host: bool) -> Any:
    """What the backend sends through where the ranks share no memory, or are on several hosts."""
    from torch.distributed import ProcessGroupGloo

    # Between hosts the host's name may stand for an address that the others cannot reach (127.0.1.1).
    address = "127.0.0.1" if is_on_one_host else _address_towards(os.environ.get("MASTER_ADDR", ""))
    if not is_on_one_host and ("GLOO_SOCKET_IFNAME" in os.environ or address.startswith("127.") or not address):
        return ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo = ProcessGroupGloo._Options()
    # On one host two ranks are connected when they first need it.
    gloo._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=is_on_one_host)]
    gloo._timeout = timeout
    return ProcessGroupGloo(store, rank, size, gloo)


def _address_towards(host: str) -> str:
    """This host's address on the route to another; empty if it is not known."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            return str(route.getsockname()[0])
    except OSError:
        return ""


@functools.cache
def _patch_monitored_barrier() -> None:
    """torch.distributed.monitored_barrier of PyTorch 2.13 refuses every backend that is not called gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if torch.__version__ >= (2, 14):
        return
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if c10d._rank_not_in_group(group) or "lockstep" not in c10d.get_backend(group):
            return original(group, timeout, wait_all_ranks)
        if timeout is not None and not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        limit = {} if timeout is None else {"timeout": timeout}
        return (group or dist.group.WORLD).monitored_barrier(**limit, wait_all_ranks=wait_all_ranks)

    dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier


@functools.cache
def _patch_ddp_logging_data() -> None:
    """The logging data of torch's DistributedDataParallel call every backend "custom" that is not torch's own."""
    from torch.distributed import get_backend
    from torch.nn.parallel import DistributedDataParallel as ddp

    original = getattr(ddp, "_get_ddp_logging_data", None)
    if original is None:  # private: another torch may do without
        return

    @functools.wraps(original)
    def logging_data(self: Any) -> dict[str, Any]:
        data: dict[str, Any] = original(self)
        if data.get("backend_name") == "custom" and "lockstep" in get_backend(self.process_group):
            data["backend_name"] = str(get_backend(self.process_group))
        return data

    ddp._get_ddp_logging_data = logging_data
