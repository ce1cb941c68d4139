"""lockstep._torch: compiled for one torch, loaded when it is used."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


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


def test_one_core_for_both_extensions():
    run("""
import lockstep, torch
from lockstep._extension import load
load()
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "liblockstep.so" in line}
assert len(libraries) == 1, libraries
""")


@pytest.mark.parametrize(
    "change, text",
    [
        ("torch.__version__ = '9.8.7+cpu'", f"built for torch {torch.__version__.split('+')[0]}, and this is torch 9.8.7"),
        ("sys.modules['lockstep._built_for'] = None", "was installed without torch, and this is torch"),
        ("platform.python_version_tuple = lambda: ('3', '99', '0')", ", and this is Python 3.99"),
    ],
)
def test_another_torch_is_an_import_error_that_names_both(change, text):
    run(f"""
import platform, sys, lockstep, torch
from lockstep._extension import load
{change}
try:
    load()
    raise AssertionError
except ImportError as error:
    assert {text!r} in str(error) and "Install lockstep again" in str(error), error
""")
