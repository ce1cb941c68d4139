"""The names of Synchronized-BatchNorm-PyTorch (https://github.com/vacancy), over one process for each rank. Needs PyTorch.

    import sys, lockstep.sync_batchnorm
    sys.modules["sync_batchnorm"] = lockstep.sync_batchnorm         # before the program imports it

The layers are those of lockstep.nn: synchronised over the ranks of torch.distributed, over any backend, or of
lockstep.init_dist(), on CPUs too. There are no threads of one process that synchronise: its SyncMaster and pipes
(sync_batchnorm.comm) are not here, and a layer that DataParallelWithCallback copies to a second device is refused.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _core, nn  # says what to install where there is no torch
from ._core import Group
from .errors import UsageError, _UsageAssertionError, _UsageValueError

# isort: split
import torch
from torch.nn.parallel import DataParallel

__all__ = [
    "CallbackContext",
    "DataParallelWithCallback",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "convert_model",
    "execute_replication_callbacks",
    "patch_replication_callback",
    "patch_sync_batchnorm",
    "set_sbn_eps_mode",
]

_eps_mode = "clamp"


def set_sbn_eps_mode(mode: str) -> None:
    """How eps keeps the variance above 0 in training over several ranks: "clamp", the default, or "plus".

    clamp: max(var, eps); plus: var + eps, as BatchNorm, and so the same result as over one rank. The same on all ranks.
    """
    global _eps_mode
    if mode not in ("clamp", "plus"):
        raise _UsageAssertionError(f"set_sbn_eps_mode: mode is {mode!r}; it must be 'clamp' or 'plus'")
    _eps_mode = mode


def _clamps_over(group: Any) -> bool:
    """Whether training over the group takes max(var, eps); over one rank the layers are BatchNorm."""
    if _eps_mode == "plus":
        return False
    size: int = _core.get_world_size(group) if group is None or isinstance(group, Group) else group.size()
    return size > 1


class _SynchronizedBatchNorm(nn.SyncBatchNorm):
    @torch.jit.ignore
    @torch.compiler.disable
    def _train(self, input: torch.Tensor) -> torch.Tensor:
        try:
            self._check_input_dim(input)
        except ValueError as error:
            raise _UsageValueError(f"{self._title or type(self).__name__}: {error}") from None
        return nn.SyncBatchNorm._train_over(self, input, _clamps_over)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id > 0:
            raise UsageError(
                f"{self._title or type(self).__name__} is synchronised over processes, and cannot be copied to a second device "
                "of one: start a process for each device (lockstep run, torchrun), with DistributedDataParallel"
            )


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm):
    """BatchNorm1d over the batches of all ranks: input (N, C) or (N, C, L). As lockstep.nn.SyncBatchNorm."""

    reverts_to = torch.nn.BatchNorm1d
    _check_input_dim = torch.nn.BatchNorm1d._check_input_dim


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm):
    """BatchNorm2d over the batches of all ranks: input (N, C, H, W). As lockstep.nn.SyncBatchNorm."""

    reverts_to = torch.nn.BatchNorm2d
    _check_input_dim = torch.nn.BatchNorm2d._check_input_dim


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm):
    """BatchNorm3d over the batches of all ranks: input (N, C, D, H, W). As lockstep.nn.SyncBatchNorm."""

    reverts_to = torch.nn.BatchNorm3d
    _check_input_dim = torch.nn.BatchNorm3d._check_input_dim


_TYPES = (SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d)


def convert_model(module: torch.nn.Module) -> torch.nn.Module:
    """Replaces every BatchNorm1d, 2d and 3d in module by the SynchronizedBatchNorm of its dimensions.

    Of a DataParallel it makes a DataParallelWithCallback. Otherwise as lockstep.nn.convert_sync_batchnorm: parameters
    and buffers remain the same tensors, and what cannot be replaced is a UsageError.
    """
    if isinstance(module, DataParallel):
        return DataParallelWithCallback(convert_model(module.module), device_ids=module.device_ids)
    return nn._convert(
        module,
        lambda layer: next((new for new in _TYPES if isinstance(layer, (new, new.reverts_to))), nn.SyncBatchNorm),
        "convert_model",
        None,
    )


@contextlib.contextmanager
def patch_sync_batchnorm() -> Iterator[None]:
    """Within a `with` block, torch.nn.BatchNorm1d, 2d and 3d are the SynchronizedBatchNorms, for what it makes."""
    names = [new.reverts_to.__name__ for new in _TYPES]
    former = [getattr(torch.nn, name) for name in names]
    for name, new in zip(names, _TYPES, strict=True):
        setattr(torch.nn, name, new)
    try:
        yield
    finally:
        for name, old in zip(names, former, strict=True):
            setattr(torch.nn, name, old)


class CallbackContext:
    """What the copies of one submodule share: their callbacks set attributes of it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def execute_replication_callbacks(modules: Sequence[torch.nn.Module]) -> None:
    """Calls __data_parallel_replicate__(ctx, copy_id) of each submodule of the copies that has it, copy 0 first."""
    contexts = [CallbackContext() for _ in modules[0].modules()]
    for copy_id, copy in enumerate(modules):
        for context, submodule in zip(contexts, copy.modules(), strict=True):
            if callback := getattr(submodule, "__data_parallel_replicate__", None):
                callback(context, copy_id)


class DataParallelWithCallback(DataParallel):
    """torch.nn.DataParallel over the GPUs of this process, which notifies the copies after each replication.

    Without GPUs, as DataParallel, it calls its module.
    """

    def replicate(self, module: Any, device_ids: Any) -> Any:
        copies = super().replicate(module, device_ids)
        execute_replication_callbacks(copies)
        return copies


def patch_replication_callback(data_parallel: DataParallel) -> None:
    """Makes an existing DataParallel notify the copies, as DataParallelWithCallback."""
    if not isinstance(data_parallel, DataParallel):
        raise _UsageAssertionError(
            f"patch_replication_callback: data_parallel is {type(data_parallel).__name__}; it must be a torch.nn.DataParallel"
        )
    replicate = data_parallel.replicate

    @functools.wraps(replicate)
    def replicate_and_notify(*args: Any, **kwargs: Any) -> Any:
        copies = replicate(*args, **kwargs)
        execute_replication_callbacks(copies)
        return copies

    data_parallel.replicate = replicate_and_notify
