"""The wheel that `./dev wheel` makes: what is in it, and what it says beside another torch."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TORCH = torch.__version__.split("+")[0]


@pytest.fixture(scope="module")
def wheel():
    done = subprocess.run([ROOT / "dev", "wheel"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    (path,) = (ROOT / "build" / "dist").glob("*.whl")
    return path


def test_is_small_names_its_torch_and_has_the_command(wheel):
    assert wheel.stat().st_size < 4_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
        assert f"Build: 1torch{TORCH}" in archive.read(metadata).decode().splitlines()
        assert f'TORCH = "{TORCH}"' in archive.read("lockstep/_built_for.py").decode().splitlines()
    assert not [name for name in names if "libtorch" in name or "libc10" in name]
    assert [name for name in names if name.startswith("lockstep/_torch.")]
    assert [name for name in names if name.endswith(".data/scripts/lockstep")]


def test_beside_another_torch_is_an_import_error_that_names_both(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, wheel]
    subprocess.run(command, check=True)
    (tmp_path / "torch.py").write_text("__version__ = '9.8.7+cpu'\n")
    program = """
import lockstep
from lockstep._extension import load
lockstep.barrier()  # what needs no torch works
try:
    load()
    raise AssertionError
except ImportError as error:
    print(lockstep.__file__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert str(tmp_path) in done.stdout
    assert f"built for torch {TORCH}, and this is torch 9.8.7" in done.stdout
