"""What `import torch` calls (entry point torch.backends) where lockstep-dist is installed: without lockstep-torch, the
backend "lockstep" and the init_method "lockstep://" say what to install. Apart from the package lockstep, which
`import torch` does not import.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NoReturn

NOT_INSTALLED = (
    "the part of lockstep that is compiled for one PyTorch is not installed: pip install lockstep-torch "
    "(in a clone of lockstep: pip install ./python/torch)"
)


def register() -> None:
    """An exception here would break `import torch`."""
    if importlib.util.find_spec("lockstep_torch") is not None:
        return
    try:
        import torch.distributed as dist

        if dist.is_available() and "lockstep" not in dist.Backend.backend_list:
            dist.Backend.register_backend("lockstep", _refuse, extended_api=True, devices=["cpu"])
            dist.register_rendezvous_handler("lockstep", _refuse)
    except Exception:  # a torch that has moved on says itself that it does not know the backend
        pass


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ImportError(NOT_INSTALLED)
