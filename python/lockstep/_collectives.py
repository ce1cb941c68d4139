"""Collectives that return new arrays; those that work in place are functions of _core."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from . import _core
from ._core import Group
from ._operation import operation
from ._world import Timeout
from .errors import _UsageTypeError


@operation
def all_gather(data: Any, group: Group | None = None, timeout: Timeout = None) -> list[Any]:
    """Every rank's data, by rank, on every rank: new arrays of the type of data.

    Shapes may differ per rank; the element type may not. The arrays share one allocation.
    """
    with _core.Operation("all_gather", group):
        flat, shapes = _core.all_gather(data, _shape_of(data), _Flat(data), group, timeout)
    return _split(flat, shapes)


@operation
def gather(data: Any, dst: int = 0, group: Group | None = None, timeout: Timeout = None) -> list[Any]:
    """As all_gather, on dst; an empty list elsewhere."""
    with _core.Operation("gather", group):
        gathered = _core.gather(data, _shape_of(data), dst, _Flat(data), group, timeout)
    return [] if gathered is None else _split(*gathered)


@operation
def all_reduce_dict(data: dict[str, Any], op: str = "sum", group: Group | None = None, timeout: Timeout = None) -> None:
    """data[key] <- reduction of every rank's data[key], on all ranks: arrays in place, numbers replaced.

    If keys, element types, lengths or op differ, every rank raises MismatchError that names them, nothing is
    changed, and the group stays usable.
    """
    reduced = _core.all_reduce_dict(data, _convert_numbers, op, group, timeout)
    data.update(reduced)


def _convert_numbers(data: Any) -> dict[str, Any]:
    """A copy with NumPy scalars converted to Python numbers."""
    if not isinstance(data, dict):
        raise _UsageTypeError(f"all_reduce_dict: data is {type(data).__name__}; it must be a dict")
    numpy = sys.modules.get("numpy")
    numbers = {
        key: value.item()
        for key, value in data.items()
        if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.bool_)
    }
    return {**data, **numbers}


def _shape_of(data: Any) -> tuple[int, ...]:
    shape = getattr(data, "shape", None)
    if shape is not None:
        return tuple(shape)
    try:
        return memoryview(data).shape or ()
    except TypeError:
        return ()  # _core says what is wrong with it


class _Flat:
    """Makes an uninitialised array of n elements, of the type of `like`."""

    def __init__(self, like: Any) -> None:
        self.like = like

    def __call__(self, n_elements: int) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(self.like, (numpy.ndarray, numpy.generic)):
            return numpy.empty(n_elements, self.like.dtype)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(self.like, torch.Tensor):
            return torch.empty(n_elements, dtype=self.like.dtype, device="cpu")
        try:
            view = memoryview(self.like)
        except TypeError:  # another DLPack tensor
            import numpy as np

            return np.empty(n_elements, np.from_dlpack(self.like).dtype)
        code: Any = view.format.lstrip("@=<")
        # An empty view cannot be cast.
        return memoryview(bytearray(max(n_elements, 1) * view.itemsize)).cast(code)[:n_elements]


def _split(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    parts = []
    begin = 0
    for shape in shapes:
        end = begin + math.prod(shape)
        part = flat[begin:end]
        if not isinstance(part, memoryview):
            part = part.reshape(shape)
        elif len(shape) != 1 and begin < end:
            part = part.cast("B").cast(flat.format, shape)
        elif len(shape) > 1 and shape[0] == 0 and all(shape[1:]):  # an empty view cannot be cast
            row = memoryview(bytearray(math.prod(shape[1:]) * flat.itemsize))
            part = row.cast(flat.format, (1, *shape[1:]))[:0]
        parts.append(part)
        begin = end
    return parts
