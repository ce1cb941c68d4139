"""Loads lockstep._torch, which is compiled for one version of torch and of Python."""

from __future__ import annotations

import functools
import platform
from types import ModuleType

_REINSTALL = "Install lockstep again beside this torch: pip install --force-reinstall --no-deps lockstep"


@functools.lru_cache(maxsize=None)
def load() -> ModuleType:
    """lockstep._torch. Raises ImportError if there is none for this torch."""
    import torch

    here = torch.__version__.split("+")[0]
    try:
        from . import _built_for
    except ImportError:
        raise ImportError(f"this lockstep was installed without torch, and this is torch {here}. {_REINSTALL}") from None
    if here != _built_for.TORCH:
        raise ImportError(f"this lockstep was built for torch {_built_for.TORCH}, and this is torch {here}. {_REINSTALL}")
    python = ".".join(platform.python_version_tuple()[:2])
    if python != _built_for.PYTHON:
        raise ImportError(
            f"the torch part of this lockstep was built for Python {_built_for.PYTHON}, and this is Python {python}. "
            f"{_REINSTALL}"
        )
    from . import _torch

    return _torch
