"""The torch that lockstep-torch is compiled for: the metadata that pin it (pyproject.toml), and, as a program, its version
and folder (CMakeLists.txt)."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_PROBE = """
import os, sys
sys.path = [path for path in sys.path if path]
import torch
if not torch.distributed.is_available(): raise SystemExit("a torch without torch.distributed")
if not torch._C._GLIBCXX_USE_CXX11_ABI: raise SystemExit("a torch with the C++ library's old ABI")
print(torch.__version__.split("+")[0], os.path.dirname(torch.__file__), sep=";", end="")
"""

_REFUSAL = (
    "lockstep-torch is compiled for the PyTorch that is installed, and this Python cannot use one ({}): install torch first, "
    "then lockstep-torch without build isolation, which hides it (pip install --no-build-isolation, uv pip install "
    "--no-build-isolation, python -m build --no-isolation; scikit-build-core must be installed, for lockstep-dist nanobind too)"
)


class Torch(NamedTuple):
    version: str  # without +cpu and the like
    folder: str


def find() -> Torch:
    """Ends the process, with a sentence, if there is none."""
    # pip's build isolation hides the torch that is installed behind PYTHONPATH, which -E ignores.
    for options in [], ["-E"]:
        command = [sys.executable, *options, "-W", "ignore", "-c", _PROBE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return Torch(*done.stdout.split(";"))
    raise SystemExit(_REFUSAL.format((done.stderr.strip().splitlines() or ["no reason given"])[-1]))


class Metadata:
    """A provider of dynamic metadata, as scikit-build-core calls it."""

    def build_state(self, build_state: str) -> None:
        self._is_sdist = build_state == "sdist"

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"dependencies": True}

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        here = Path(__file__).parent
        sources = here / "lockstep" if (here / "lockstep").exists() else here.parents[1]
        found = re.search(r"project\(lockstep VERSION ([0-9.]+)", (sources / "CMakeLists.txt").read_text())
        assert found
        torch = "torch" if self._is_sdist else f"torch=={find().version}"
        return {"version": found[1], "dependencies": [f"lockstep-dist=={found[1]}", torch]}


if __name__ == "__main__":
    print(*find(), sep=";", end="")
