"""The names of mmengine.dist, with its arguments and results, over the groups of torch.distributed. Needs PyTorch.

    import sys, lockstep.mmengine
    for name in "mmengine.dist", "mmengine.dist.dist", "mmengine.dist.utils":  # before mmengine is imported
        sys.modules[name] = lockstep.mmengine

Over any backend (gloo, nccl, lockstep), and in a process that has initialised none: a world of one rank, in which
functions return what they are given. The names of lockstep itself are those of its own groups, and check more.
`group` is one of torch.distributed, by default its world. `src` and `dst` are ranks of that world, as in torch.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lockstep.mmengine needs PyTorch, which is not installed ({error}): pip install torch", name="torch"
    ) from None
import torch.distributed as torch_dist
import torch.multiprocessing

from . import _tensors
from ._tensors import get_data_device
from ._world import DistInfo
from .errors import UsageError, _UsageAssertionError, _UsageTypeError, _UsageValueError

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cast_data_device",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_default_group",
    "get_dist_info",
    "get_local_group",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "infer_launcher",
    "init_dist",
    "init_local_group",
    "is_distributed",
    "is_main_process",
    "master_only",
    "sync_random_seed",
]

F = TypeVar("F", bound=Callable[..., Any])

# Whose tensors a backend sends; those of all others are on the CPU.
_DEVICES = {"nccl": "cuda", "smddp": "cuda", "hccl": "npu", "cncl": "mlu", "mccl": "musa"}

# From which variables of a launcher those of torch are; and one of them that it alone sets.
_LAUNCHERS: dict[str, dict[str, str]] = {
    "pytorch": {"WORLD_SIZE": "WORLD_SIZE"},
    "slurm": {"WORLD_SIZE": "SLURM_NTASKS", "RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"},
    "mpi": {
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    },
}

# How else than by torch itself torch.distributed is initialised: module, function, and the name of its backend argument.
_INITIALISERS = {
    "deepspeed": ("deepspeed", "init_distributed", "dist_backend"),
    "colossalai": ("colossalai", "launch_from_torch", "backend"),
}

_local_group: tuple[Any, Any] = (None, None)  # the world for which it was made, and the group


class _UsageNotImplementedError(UsageError, NotImplementedError):
    """A UsageError where mmengine.dist raises NotImplementedError."""


# --- groups and ranks


def is_distributed() -> bool:
    """Whether torch.distributed is initialised."""
    return bool(torch_dist.is_available() and torch_dist.is_initialized())


def infer_launcher() -> str:
    """What started this process, from its environment: pytorch (also `lockstep run`), slurm, mpi (Open MPI) or none."""
    return next((name for name, variables in _LAUNCHERS.items() if next(iter(variables.values())) in os.environ), "none")


def init_dist(launcher: str, backend: str = "nccl", init_backend: str = "torch", **kwargs: Any) -> None:
    """Initialises torch.distributed over backend, in a process that launcher (pytorch, slurm or mpi) started.

    init_backend: what calls init_process_group: torch, deepspeed or colossalai. kwargs: arguments of that; timeout in
    seconds. Under slurm and mpi, without MASTER_ADDR, the ranks find each other by lockstep's world; port (or
    MASTER_PORT) is that of the store of rank 0. Where there are accelerators, the current one is that of the local rank.
    """
    if launcher not in _LAUNCHERS:
        raise _UsageValueError(f"init_dist: launcher is {launcher!r}; it must be one of {', '.join(_LAUNCHERS)}")
    if init_backend != "torch" and init_backend not in _INITIALISERS:
        raise _UsageValueError(f"init_dist: init_backend is {init_backend!r}; it must be torch, {' or '.join(_INITIALISERS)}")
    timeout, port = kwargs.pop("timeout", None), kwargs.pop("port", None)
    if isinstance(timeout, (int, float)):
        timeout = datetime.timedelta(seconds=timeout)
    if timeout is not None and not isinstance(timeout, datetime.timedelta):
        raise _UsageTypeError(f"init_dist: timeout is {type(timeout).__name__}; it must be seconds, as in timeout=1800")
    if timeout is not None:
        kwargs["timeout"] = timeout
    if backend == "nccl" and not torch.cuda.is_available():
        raise UsageError("init_dist: backend is 'nccl', and this process has no GPU: pass backend='gloo' or backend='lockstep'")
    if torch.multiprocessing.get_start_method(allow_none=True) is None:
        torch.multiprocessing.set_start_method("spawn")
    _set_environment(launcher, port)
    if "lockstep" in backend:
        importlib.import_module("lockstep.torch")  # registers it
    if torch.accelerator.is_available() and int(os.environ["LOCAL_RANK"]) < torch.accelerator.device_count():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if init_backend == "torch":
        torch_dist.init_process_group(backend=backend, **kwargs)
    else:
        module, function, argument = _INITIALISERS[init_backend]
        getattr(importlib.import_module(module), function)(**{argument: backend}, **kwargs)


def _set_environment(launcher: str, port: int | None) -> None:
    """Sets the variables that torchrun sets."""
    if launcher != "pytorch" and "MASTER_ADDR" not in os.environ:
        from . import torch as lockstep_torch

        lockstep_torch.set_environment()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if launcher == "pytorch" else _LAUNCHERS[launcher]:
        source = _LAUNCHERS[launcher].get(name, name)
        if source not in os.environ and name not in os.environ:
            raise UsageError(
                f"init_dist: launcher is {launcher!r}, and the environment lacks {source}: start the program with that launcher, "
                f"or name the one that did (infer_launcher() says {infer_launcher()!r})"
            )
        os.environ[name] = os.environ.get(source, os.environ.get(name, ""))
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    os.environ.setdefault("MASTER_PORT", "29500")


def get_default_group() -> Any:
    """The world of torch.distributed. A ValueError if it is not initialised."""
    if not is_distributed():
        raise _UsageValueError("get_default_group: torch.distributed is not initialised: call init_dist before")
    return torch_dist.group.WORLD


def init_local_group(node_rank: int, num_gpus_per_node: int) -> None:
    """Makes the group of this host's ranks, if each host has num_gpus_per_node. Collective over the world.

    node_rank: which of the hosts this is.
    """
    global _local_group
    if _local_group[0] is not None and _local_group[0] is torch_dist.group.WORLD:
        raise _UsageAssertionError("init_local_group: the local group is there already: use get_local_group()")
    world, size = get_default_group(), get_world_size()
    firsts = range(0, size, num_gpus_per_node)
    if not 0 <= node_rank < len(firsts):
        raise _UsageValueError(
            f"init_local_group: node_rank is {node_rank}; {size} ranks are on {len(firsts)} hosts of {num_gpus_per_node} each"
        )
    groups = [torch_dist.new_group(list(range(first, min(first + num_gpus_per_node, size)))) for first in firsts]
    _local_group = world, groups[node_rank]


def get_local_group() -> Any:
    """The group of init_local_group; None if not distributed."""
    if not is_distributed():
        return None
    if _local_group[0] is not torch_dist.group.WORLD:
        raise UsageError("get_local_group: there is no local group: call init_local_group(node_rank, num_gpus_per_node) before")
    return _local_group[1]


def get_backend(group: Any = None) -> str | None:
    """gloo, nccl, lockstep, ...; None if not distributed."""
    return torch_dist.get_backend(group) if is_distributed() else None


def get_world_size(group: Any = None) -> int:
    """The number of ranks in the group; 1 if not distributed, -1 if this rank is not in it."""
    return torch_dist.get_world_size(group) if is_distributed() else 1


def get_rank(group: Any = None) -> int:
    """This rank in the group; 0 if not distributed, -1 if it is not in it."""
    return torch_dist.get_rank(group) if is_distributed() else 0


def get_local_size() -> int:
    """The number of ranks in the group of init_local_group; 1 if not distributed."""
    return get_world_size(get_local_group())


def get_local_rank() -> int:
    """This rank in the group of init_local_group; 0 if not distributed."""
    return get_rank(get_local_group())


def get_dist_info(group: Any = None) -> tuple[int, int]:
    """(rank, world_size)"""
    return DistInfo(get_rank(group), get_world_size(group))


def is_main_process(group: Any = None) -> bool:
    """Whether this is rank 0 of the group."""
    return get_rank(group) == 0


def master_only(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function runs on rank 0 of the world only, and returns None on other ranks. No rank waits."""

    @functools.wraps(func)
    def on_master(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) if is_main_process() else None

    return on_master


def barrier(group: Any = None) -> None:
    """Returns when every rank of the group has called it."""
    if is_distributed():
        torch_dist.barrier(group)


# --- devices


def get_comm_device(group: Any = None) -> torch.device:
    """The device of the tensors that the group's backend sends: the current GPU for nccl, the CPU for gloo and lockstep."""
    kind = _DEVICES.get(str(get_backend(group)))
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def cast_data_device(data: Any, device: torch.device | str, out: Any = None) -> Any:
    """data (a tensor, or sequences and dicts of them) with its tensors on device, without a copy of those already there.

    With out, of the same structure: its tensors get the values too.
    """
    if out is not None:
        _tensors.cast_data_device(data, device, out)
    cast = _tensors.cast_data_device(data, device)
    if not any(True for _ in _tensors.tensors_of(cast)):
        raise _UsageValueError("cast_data_device: data should not be empty, and has no tensor")
    return cast


# --- collectives


def _over_ranks(alone: Callable[[Any], Any], kind: type = object) -> Callable[[F], F]:
    """Makes of a function over several ranks one that over one rank returns alone(its first argument), of type kind."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise _UsageTypeError(f"{function.__name__}: {error}") from None
            data, group = next(iter(given.values())), given.get("group")
            if not isinstance(data, kind):
                raise _UsageAssertionError(f"{function.__name__}: data is {type(data).__name__}; it must be a {kind.__name__}")
            size = get_world_size(group)
            if size == 1:
                return alone(data)
            if size < 0:
                raise UsageError(f"{function.__name__}: this rank is not in the group: call it on the group's ranks only")
            with torch.no_grad():
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _nothing(data: Any) -> None:
    return None


def _listed(data: Any) -> list[Any]:
    return [data]


def _sent(function: str, data: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """data without what autograd records of it; and, if it is not as a backend takes it, a copy that is, or else itself."""
    if not isinstance(data, torch.Tensor):
        raise _UsageTypeError(f"{function}: data is {type(data).__name__}; it must be a tensor")
    own = data.detach()
    return own, own.to(get_comm_device(group)).resolve_conj().resolve_neg().contiguous()


@_over_ranks(alone=_nothing)
def all_reduce(data: torch.Tensor, op: str = "sum", group: Any = None) -> None:
    """data <- reduction of every rank's data, in place, on any device: sum, product, min, max, band, bor, bxor or mean.

    mean is the sum divided by the number of ranks; of integers truncated.
    """
    ops = {"mean": "SUM", **{name.lower(): name for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}}
    if str(op).lower() not in ops:
        raise _UsageValueError(f"all_reduce: op is {op!r}; it must be one of {', '.join(ops)}")
    own, sent = _sent("all_reduce", data, group)
    torch_dist.all_reduce(sent, getattr(torch_dist.ReduceOp, ops[op.lower()]), group)
    own.copy_(sent if op.lower() != "mean" else torch.true_divide(sent, get_world_size(group)))


@_over_ranks(alone=_listed)
def all_gather(data: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every rank's data, by rank, on every rank; over one rank data itself. The same shape on all ranks."""
    own, sent = _sent("all_gather", data, group)
    parts = [torch.empty_like(sent) for _ in range(get_world_size(group))]
    torch_dist.all_gather(parts, sent, group)
    return [part.to(own.device) for part in parts]


@_over_ranks(alone=_listed)
def gather(data: torch.Tensor, dst: int = 0, group: Any = None) -> list[torch.Tensor]:
    """As all_gather, on dst; an empty list elsewhere."""
    own, sent = _sent("gather", data, group)
    parts = [torch.empty_like(sent) for _ in range(get_world_size(group))] if get_rank() == dst else []
    torch_dist.gather(sent, parts or None, dst, group)
    return [part.to(own.device) for part in parts]


@_over_ranks(alone=_nothing)
def broadcast(data: torch.Tensor, src: int = 0, group: Any = None) -> None:
    """data <- src's data, in place, on any device."""
    own, sent = _sent("broadcast", data, group)
    torch_dist.broadcast(sent, src, group)
    if get_rank() != src:
        own.copy_(sent)


def sync_random_seed(group: Any = None) -> int:
    """A random seed of 31 bits, that of the group's first rank, on all ranks. Each draws one of numpy.random."""
    import numpy

    seed = numpy.random.randint(2**31)
    if get_world_size(group) == 1:
        return int(seed)
    box = torch.tensor(seed, dtype=torch.int64)
    broadcast(box, torch_dist.get_global_rank(get_default_group() if group is None else group, 0), group)
    return int(box.item())


@_over_ranks(alone=_listed)
def all_gather_object(data: Any, group: Any = None) -> list[Any]:
    """Every rank's object, by rank, on every rank."""
    parts = [None] * get_world_size(group)
    torch_dist.all_gather_object(parts, data, group)
    return parts


@_over_ranks(alone=_listed)
def gather_object(data: Any, dst: int = 0, group: Any = None) -> list[Any] | None:
    """Every rank's object, by rank, on dst; None elsewhere."""
    parts = [None] * get_world_size(group) if get_rank() == dst else None
    torch_dist.gather_object(data, parts, dst, group)
    return parts


@_over_ranks(alone=_nothing, kind=list)
def broadcast_object_list(data: list[Any], src: int = 0, group: Any = None) -> None:
    """data <- src's data, in place. The lists have the same length on all ranks."""
    torch_dist.broadcast_object_list(data, src, group)


@_over_ranks(alone=_nothing, kind=dict)
def all_reduce_dict(data: dict[str, torch.Tensor], op: str = "sum", group: Any = None) -> None:
    """data[key] <- a new tensor, the reduction of every rank's data[key]. The same keys and shapes on all ranks.

    In one message, and so of the one type to which PyTorch promotes all of them. Another one compares keys and shapes:
    ValueError on every rank where they differ.
    """
    keys = sorted(data)
    for key in keys:
        if not isinstance(data[key], torch.Tensor):
            raise _UsageTypeError(f"all_reduce_dict: data[{key!r}] is {type(data[key]).__name__}; it must be a tensor")
    _compare_dicts([(key, *data[key].shape) for key in keys], group)
    flat = torch.cat([data[key].detach().flatten() for key in keys]) if keys else torch.empty(0)
    all_reduce(flat, op, group)
    for key, part in zip(keys, flat.split([data[key].numel() for key in keys]), strict=False):
        data[key] = part.reshape(data[key].shape)


def _compare_dicts(layout: list[tuple[Any, ...]], group: Any) -> None:
    digest = int.from_bytes(hashlib.blake2b(repr(layout).encode(), digest_size=7).digest(), "big")
    extremes = torch.tensor([digest, -digest])
    all_reduce(extremes, "max", group)
    if extremes[0] == -extremes[1]:
        return
    own, *others = all_gather_object(layout, group)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != own)
    only = [f"{key!r} of shape {shape}" for key, *shape in own if (key, *shape) not in other]
    more = [f"{key!r} of shape {shape}" for key, *shape in other if (key, *shape) not in own]
    raise _UsageValueError(
        f"all_reduce_dict: the ranks' dicts differ: only rank 0 of the group has {', '.join(only) or 'nothing'}, "
        f"only rank {rank} {', '.join(more) or 'nothing'}"
    )


@_over_ranks(alone=_nothing)
def all_reduce_params(
    params: Iterable[torch.Tensor], coalesce: bool = True, bucket_size_mb: int = -1, op: str = "sum", group: Any = None
) -> None:
    """Reduces parameters, or gradients, or any tensors in place, as lockstep.all_reduce_params, on any device."""
    _tensors.reduce_buckets(
        _tensors.params_data(params), coalesce, bucket_size_mb, lambda flat: all_reduce(flat, op, group)
    )


# --- results


def collect_results(results: list[Any], size: int, device: str = "cpu", tmpdir: str | None = None) -> list[Any] | None:
    """The ranks' results interleaved, on rank 0: item 0 of rank 0, of rank 1, ..., item 1 of rank 0, ...; cut to size.

    None on other ranks. Their lengths may differ; over several ranks, items that are None are left out.
    device: "cpu", or "gpu" or "npu", which takes no tmpdir. tmpdir: a directory that all ranks share (which is made if
    there is none); the results then pass through files in it, which are removed, and it too if it is empty.
    """
    if device not in ("cpu", "gpu", "npu"):
        raise _UsageNotImplementedError(f"collect_results: device is {device!r}; it must be 'cpu', 'gpu' or 'npu'")
    if device == "cpu":
        return collect_results_cpu(results, size, tmpdir)
    if tmpdir is not None:
        raise _UsageAssertionError(f"collect_results: device is {device!r}, for which tmpdir must be None, and is {tmpdir!r}")
    return collect_results_gpu(results, size)


def collect_results_cpu(result_part: list[Any], size: int, tmpdir: str | None = None) -> list[Any] | None:
    """collect_results of device "cpu". Without tmpdir no file is written, but over backends of GPUs, whose memory is
    spared: then in a directory beneath the current one."""
    if get_world_size() == 1:
        return result_part[:size]
    if tmpdir is None and get_comm_device().type == "cpu":
        return _interleaved(gather_object(result_part), size)
    return _interleaved(_gathered_by_files(result_part, tmpdir), size)


def collect_results_gpu(result_part: list[Any], size: int) -> list[Any] | None:
    """collect_results of device "gpu": through the memory of the GPUs where the backend sends from it."""
    if get_world_size() == 1:
        return result_part[:size]
    parts = all_gather_object(result_part)
    return _interleaved(parts if is_main_process() else None, size)


def _interleaved(parts: list[list[Any]] | None, size: int) -> list[Any] | None:
    if parts is None:
        return None
    return [item for items in itertools.zip_longest(*parts) for item in items if item is not None][:size]


def _load_part(file: Path, owner: int) -> Any:
    """Of that user alone: a pickle runs code."""
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as part:
        if os.fstat(part.fileno()).st_uid != owner:
            raise PermissionError(f"collect_results: {file} belongs to another user")
        return pickle.load(part)


def _gathered_by_files(part: list[Any], tmpdir: str | None) -> list[list[Any]] | None:
    """Every rank's part, by rank, on rank 0; None elsewhere."""
    rank, size = get_dist_info()
    place = [tmpdir, uuid.uuid4().hex]  # names that nobody else knows before the files are there
    if tmpdir is None and rank == 0:
        place[0] = tempfile.mkdtemp(prefix=".collect_results-", dir=".")
    broadcast_object_list(place)
    folder = Path(tmpdir or place[0])  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part_{other}-{place[1]}.pkl" for other in range(size)]
    with open(os.open(files[rank], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as own:
        pickle.dump(part, own, pickle.HIGHEST_PROTOCOL)
    barrier()
    if rank != 0:
        return None
    if missing := [other for other, file in enumerate(files) if not file.exists()]:
        raise FileNotFoundError(
            f"collect_results: {folder} has no file of ranks {missing}: give a tmpdir that all ranks share"
        )
    parts = [_load_part(file, files[0].stat().st_uid) for file in files]
    for file in files:
        file.unlink()
    with contextlib.suppress(OSError):  # it has other files
        folder.rmdir()
    return parts
