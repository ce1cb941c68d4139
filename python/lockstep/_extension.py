"""Loads lockstep_torch._torch, of lockstep-torch, which is compiled for one version of torch and of Python."""

from __future__ import annotations

import functools
import importlib
import platform
from types import ModuleType

from lockstep_dist import NOT_INSTALLED

from . import _core

_REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir"


@functools.cache
def load() -> ModuleType:
    """lockstep_torch._torch. Raises ImportError if there is none for this torch, Python and lockstep-dist."""
    import torch

    try:
        _built_for = importlib.import_module("lockstep_torch._built_for")
    except ImportError:
        raise ImportError(NOT_INSTALLED) from None
    again = f"Install lockstep-torch again: {_REINSTALL} lockstep-torch (in a clone of lockstep: ./python/torch)"
    here = torch.__version__.split("+")[0]
    if here != _built_for.TORCH:
        raise ImportError(f"this lockstep-torch was built for torch {_built_for.TORCH}, and this is torch {here}. {again}")
    python = ".".join(platform.python_version_tuple()[:2])
    if python != _built_for.PYTHON:
        raise ImportError(
            f"this lockstep-torch was built for Python {_built_for.PYTHON}, and this is Python {python}. {again}"
        )
    if _core._binary_interface != _built_for.BINARY_INTERFACE:
        raise ImportError(
            f"this lockstep-torch was built for binary interface {_built_for.BINARY_INTERFACE}, and this lockstep-dist "
            f"{_core.__version__} has {_core._binary_interface}. Install both from one release: {_REINSTALL} "
            "lockstep-dist lockstep-torch (in a clone of lockstep: . ./python/torch)"
        )
    return importlib.import_module("lockstep_torch._torch")
