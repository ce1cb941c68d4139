"""Reducing lists of tensors, and their devices, as in mmengine.dist. PyTorch is imported at the first use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from . import _core
from ._core import Group
from ._operation import operation
from ._world import Timeout
from .errors import UsageError, _UsageTypeError, _UsageValueError

if TYPE_CHECKING:
    import torch


@operation
def all_reduce_params(
    params: Iterable[torch.Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: Group | None = None,
    timeout: Timeout = None,
) -> None:
    """Reduces parameters (or gradients, or any tensors) in place over all ranks.

    In one message per element type or, with a bucket_size_mb above 0, in messages of about that many MiB;
    coalesce=False: one message per tensor. The tensors may have any layout and may require gradients, which
    are not recorded. The same tensors in the same order on all ranks; one that comes twice is reduced once, and
    of tensors that overlap every element once.
    It sums, as mmengine: op="mean" averages.
    """
    with _core.Operation("all_reduce_params", group):
        import torch

        data = params_data(params)
        for index, tensor in enumerate(data):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise UsageError(
                    f"all_reduce_params: tensor {index} is {tensor.layout} on {tensor.device}; expected dense tensors "
                    "on the CPU: pass x.cpu(), and copy the result back"
                )
        reduce_buckets(data, coalesce, bucket_size_mb, lambda flat: _core.all_reduce(flat, op, group, timeout))


def params_data(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The params, each once, without what autograd records of them."""
    import torch

    if isinstance(params, (dict, str, torch.Tensor)) or not isinstance(params, Iterable):
        raise _UsageTypeError(f"all_reduce_params: params is {type(params).__name__}; it must be an iterable of tensors")
    once = list({id(param): param for param in params}.values())
    for index, param in enumerate(once):
        if not isinstance(param, torch.Tensor):
            raise _UsageTypeError(f"all_reduce_params: params holds {type(param).__name__} at {index}; expected tensors")
    return [param.detach() for param in once]


def reduce_buckets(
    own: list[torch.Tensor], coalesce: bool, bucket_size_mb: float, reduce: Callable[[torch.Tensor], None]
) -> None:
    """Reduces dense tensors in place, in few messages: reduce(tensor) is one."""
    import torch

    for index, tensor in enumerate(own):
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(f"all_reduce_params: tensor {index} is expanded: several of its elements share memory")
    limit = bucket_size_mb * 1024 * 1024 if coalesce else 0
    data = own
    if _share_memory(own):  # a message must not have what another one has already reduced
        data = [tensor.clone() for tensor in own]
    for bucket in _buckets(data, limit):
        if len(bucket) == 1 and bucket[0].is_contiguous() and not bucket[0].is_neg():
            reduce(bucket[0])
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        reduce(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))
    for tensor, copy in zip(own, data, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def _share_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether the memory of two of them overlaps, gaps of strided tensors included."""
    ranges = []
    for tensor in tensors:
        if tensor.numel() and not tensor._is_zerotensor():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    ranges.sort()
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def _buckets(tensors: list[torch.Tensor], limit: float) -> Iterable[list[torch.Tensor]]:
    """Groups tensors by dtype and device; a bucket is complete at `limit` bytes if that is not negative."""
    is_open: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    n_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        is_open.setdefault(kind, []).append(tensor)
        n_bytes[kind] = n_bytes.get(kind, 0) + tensor.nbytes
        if 0 <= limit <= n_bytes[kind]:
            n_bytes[kind] = 0
            yield is_open.pop(kind)
    yield from is_open.values()


def get_data_device(data: Any) -> torch.device:
    """The device of the tensors in data: a tensor, or sequences, sets and dicts of them.

    UsageError if there is none, or they are on several devices, which is a ValueError too; or if the data holds
    something else, which is a TypeError too.
    """
    devices = {tensor.device for tensor in tensors_of(data)}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise _UsageValueError(
            f"get_data_device: tensors are on {found}: move them to one device with cast_data_device"
            if devices
            else "get_data_device: there is no tensor in the data"
        )
    return devices.pop()


def get_comm_device(group: Group | None = None) -> torch.device:
    """The device of tensors for the group's operations: the CPU."""
    import torch

    return torch.device("cpu")


def cast_data_device(data: Any, device: torch.device | str, out: Any = None) -> Any:
    """data (a tensor, or sequences, sets and dicts of them) with its tensors on device.

    No copy of those already there. With out, of the same structure: copied into its tensors, and out returned.
    """
    import torch

    if out is not None:
        if type(out) is not type(data):
            raise _UsageTypeError(
                f"cast_data_device: out should be the same type with data; out is {_described(out)}, data {_described(data)}"
            )
        if isinstance(out, Set):
            raise _UsageTypeError("cast_data_device: out should not be a set, which has no order: use a list")
        if not isinstance(data, torch.Tensor) and len(out) != len(data):
            raise _UsageValueError(
                f"cast_data_device: length of data and out should be same; out is {_described(out)}, data {_described(data)}"
            )
    if isinstance(data, torch.Tensor):
        return data.to(device) if out is None else out.copy_(data)
    if isinstance(data, Mapping):
        if out is not None and out.keys() != data.keys():
            raise _UsageValueError(f"cast_data_device: out has the keys {sorted(out)}, data {sorted(data)}")
        items = {key: cast_data_device(value, device, None if out is None else out[key]) for key, value in data.items()}
        return type(data)(items) if out is None else out  # type: ignore[call-arg]
    if _is_sequence(data):
        values = [cast_data_device(value, device, None if out is None else out[i]) for i, value in enumerate(data)]
        if out is not None:
            return out
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    raise _UsageTypeError(
        "cast_data_device: data should be a Tensor, list of tensor or dict of these, or lists and dicts of such; "
        f"data holds {_described(data)}"
    )


def _described(data: Any) -> str:
    return f"{type(data).__name__} of {len(data)}" if isinstance(data, (list, tuple, dict)) else type(data).__name__


def _is_sequence(data: Any) -> bool:
    """Of what may be tensors: a str or an array is not."""
    return isinstance(data, Iterable) and not isinstance(data, (str, bytes, bytearray)) and not hasattr(data, "__array__")


def tensors_of(data: Any) -> Iterable[torch.Tensor]:
    """Those of get_data_device."""
    import torch

    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping) or _is_sequence(data):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(item)
    else:
        raise _UsageTypeError(
            "get_data_device: data should be a Tensor, sequence of tensor or dict of these, or lists and dicts of such; "
            f"data holds {_described(data)}"
        )
