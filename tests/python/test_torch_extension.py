"""lockstep_torch._torch: compiled for one torch, loaded when it is used."""

import importlib.util
import os
import platform  # noqa: F401 - changed by its name
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import on_ranks, raises

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from lockstep_torch._built_for import BINARY_INTERFACE as STAMP  # noqa: E402

import lockstep  # noqa: E402
from lockstep._extension import load  # noqa: E402


def other_python():
    return ("3", "99", "0")


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_torch_registers_the_backend_alone():
    run("""
import sys, torch
assert "lockstep" in torch.distributed.Backend.backend_list
assert torch.distributed.Backend.backend_capability["lockstep"] == ["cpu"]
assert "lockstep" not in sys.modules
""")


def test_nn_is_imported_at_its_first_use():
    run("""
import sys, lockstep
assert "torch" not in sys.modules
assert lockstep.nn.convert_sync_batchnorm
assert lockstep.torch.set_environment and "torch" in sys.modules
""")


def test_registering_replaces_nothing_of_torch():
    run("""
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import sys, torch, torch.distributed as dist
import torch.distributed.rendezvous, torch.nn.parallel.distributed
def attributes():
    return {
        (name, attribute): value
        for name, module in sys.modules.copy().items() if name.split(".")[0] == "torch"
        for owner in (module, *[kind for kind in vars(module).values() if isinstance(kind, type)])
        for attribute, value in vars(owner).copy().items()
    }
assert "lockstep" not in dist.Backend.backend_list
before = attributes()
import lockstep_torch
lockstep_torch.register()
lockstep_torch.register()
after = attributes()
changed = [name for name, value in before.items() if after.get(name, None) is not value and name[1] != "LOCKSTEP"]
new = [name for name in after.keys() - before.keys() if name[1] != "LOCKSTEP"]
assert not changed and not new, (changed, new)
assert "lockstep" in dist.Backend.backend_list and "lockstep" not in sys.modules
""")


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="UndefinedBehaviorSanitizer's reports name the sources")
def test_the_binary_names_no_folder_in_which_it_was_compiled():
    folder = Path(torch.__file__).parent
    (binary,) = Path(importlib.util.find_spec("lockstep_torch").origin).parent.glob("_torch*.so")
    for path in folder, Path(__file__).parents[2]:
        assert str(path).encode() not in binary.read_bytes()


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="has no entry points of backends")
def test_naming_the_backend_registers_it():
    run("""
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch, torch.distributed as dist
assert "lockstep" not in dist.Backend.backend_list
original = dist.monitored_barrier
dist.init_process_group("lockstep", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "lockstep" and dist.monitored_barrier is original
""")


@on_ranks(1, launcher=[], init=None)
def test_lockstep_nn_leaves_torchs_monitored_barrier():
    import lockstep.nn  # noqa: F401

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.monitored_barrier()
    dist.destroy_process_group()
    dist.init_process_group("lockstep", store=dist.HashStore(), rank=0, world_size=1)
    dist.monitored_barrier()
    other = dist.new_group(backend="gloo")
    dist.monitored_barrier(other)


@on_ranks(1, launcher=[], init=None)
def test_one_core_for_both_extensions():
    load()
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "liblockstep.so" in line}
    assert len(libraries) == 1, libraries


@pytest.mark.parametrize(
    "owner, name, value, text",
    [
        ("torch", "__version__", "9.8.7+cpu", f"built for torch {torch.__version__.split('+')[0]}, and this is torch 9.8.7"),
        ("platform", "python_version_tuple", other_python, ", and this is Python 3.99"),
        (
            "lockstep._core",
            "_binary_interface",
            "other",
            f"was built for binary interface {STAMP}, and this lockstep-dist {lockstep.__version__} has other",
        ),
    ],
)
@on_ranks(1, launcher=[], init=None)
def test_another_torch_is_an_import_error_that_names_both(owner, name, value, text):
    setattr(sys.modules[owner], name, value)
    with raises(ImportError, text, "pip install", "lockstep-torch"):
        load()


@pytest.mark.parametrize(
    "use",
    [
        "import lockstep.nn",
        "import lockstep.torch",
        "dist.init_process_group('lockstep', store=dist.HashStore(), rank=0, world_size=1)",
        "dist.init_process_group('lockstep', init_method='lockstep://')",
    ],
)
def test_without_lockstep_torch_says_what_to_install(use):
    run(f"""
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import importlib.metadata, importlib.util, torch, torch.distributed as dist
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lockstep_torch" else find_spec(name, *rest)
sys.modules["lockstep_torch"] = None
(entry_point,) = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "lockstep_dist"]
entry_point.load()()
assert "lockstep" not in sys.modules
try:
    {use}
    raise AssertionError
except ImportError as error:
    assert "pip install lockstep-torch" in str(error), error
""")
