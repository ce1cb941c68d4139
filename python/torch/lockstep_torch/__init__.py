"""Makes torch.distributed know the backend "lockstep" and the init_method "lockstep://".

torch itself imports this: at the end of `import torch` (the entry point torch.backends), or when the backend is first
named (torch.distributed.backends, from PyTorch 2.14). Apart from the package lockstep, which is imported when a process group is
made. Nothing of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def register() -> None:
    """An exception here would break `import torch`."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "lockstep" in dist.Backend.backend_list:
            return
        dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu"])
        dist.register_rendezvous_handler("lockstep", _rendezvous)
    except Exception as error:  # a torch that has moved on
        import warnings

        warnings.warn(f"lockstep cannot register its backend with this torch: {error!r}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from lockstep._backend import create

    return create(options, pg_options)


def _rendezvous(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    from lockstep._backend import rendezvous

    yield rendezvous(timeout)
    raise RuntimeError("lockstep:// has no second rendezvous of one group")
