"""Makes torch.distributed know the backend "lockstep". torch itself imports this, at the end of `import torch`.

Apart from the package lockstep, which is imported when a process group is made.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """The entry point of the group torch.backends. An exception here would break `import torch`."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu"])
    except Exception as error:  # a torch that has moved on
        import warnings

        warnings.warn(f"lockstep cannot register its backend with this torch: {error!r}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from lockstep._backend import create

    return create(options, pg_options)
