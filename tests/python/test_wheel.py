"""The wheels that `./dev wheel` makes: what is in them, what their tags and requirements say, what they do beside another
torch; and that lockstep-torch is not built without torch."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TORCH = torch.__version__.split("+")[0]
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


def run(command, code=0, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert (done.returncode == 0) == (code == 0), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheels():
    run([ROOT / "dev", "wheel"])
    paths = {path.name.split("-")[0]: path for path in (ROOT / "build" / "dist").glob("*.whl")}
    assert set(paths) == {"lockstep_dist", "lockstep_torch"}
    return paths


def read(wheel):
    """The names of its files, and the lines of METADATA and WHEEL."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = [archive.read(name).decode() for name in names if re.search(r"\.dist-info/(METADATA|WHEEL)$", name)]
    return names, "\n".join(texts).splitlines()


def readelf(option, wheel, folder):
    run([sys.executable, "-m", "zipfile", "-e", wheel, folder])
    binaries = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    assert binaries
    return run(["readelf", option, *binaries], env={**os.environ, "LC_ALL": "C"})


def needed(wheel, folder):
    """The libraries that its binaries need."""
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", wheel, folder)))


def versions(wheel, folder, library):
    """The versions of the symbols that its binaries need of a library, as tuples."""
    found = re.findall(rf"\b{library}_([\d.]+)", readelf("--version-info", wheel, folder))
    return {tuple(map(int, each.split("."))) for each in found}


@pytest.mark.parametrize("name", ["lockstep_dist", "lockstep_torch"])
def test_the_platform_tag_says_what_the_binaries_need(name, wheels, tmp_path):
    names, lines = read(wheels[name])
    (tag,) = [line for line in lines if line.startswith("Tag: ")]
    found = re.fullmatch(r"Tag: .*-manylinux_2_(\d+)_\w+", tag)
    assert found and int(found[1]) <= 34, tag
    assert wheels[name].name.endswith(tag.rpartition("-")[2] + ".whl")
    # By PEP 600, the libraries of the distributions of that time: libstdc++ of GCC 11 beside glibc 2.34.
    assert max(versions(wheels[name], tmp_path, "GLIBC")) <= (2, int(found[1]))
    assert max(versions(wheels[name], tmp_path, "GLIBCXX")) <= (3, 4, 29)
    # Nothing is copied into it: an MPI, UCX or a torch is the user's, and of one kind in a process.
    assert not [each for each in names if re.search(r"\.libs/|/lib(mpi|mpich|open-|uc[pst]|udev|numa|torch|c10|stdc)", each)]
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    own = {"liblockstep.so"}
    others = {
        "lockstep_dist": {"libmpi.so.40", "libmpich.so.12", "libucp.so.0", "libucs.so.0"},
        "lockstep_torch": {"libtorch_python.so", "libtorch_cpu.so", "libtorch.so", "libc10.so"},
    }
    assert needed(wheels[name], tmp_path) <= system | own | others[name]
    assert [each for each in names if re.search(r"\.dist-info/licenses/(packaging/)?copyright$", each)]


def test_lockstep_dist_looks_for_nothing_in_a_temporary_folder(wheels, tmp_path):
    """As that of the build is, which anybody may make where the wheel is installed."""
    run([sys.executable, "-m", "zipfile", "-e", wheels["lockstep_dist"], tmp_path])
    for path in tmp_path.rglob("*"):
        found = path.is_file() and re.search(rb"/(tmp|var/tmp)/[!-~]+", path.read_bytes())
        assert not found, (path, found[0])


def test_lockstep_dist_is_free_of_torch_and_says_what_it_runs_on(wheels, tmp_path):
    wheel = wheels["lockstep_dist"]
    names, lines = read(wheel)
    assert wheel.stat().st_size < 4_000_000
    assert not [name for name in names if re.search(r"_torch\b|lockstep_torch|_built_for|libtorch|libc10", name)]
    assert not [name for name in needed(wheel, tmp_path) if re.search("torch|c10|fmt", name)]
    assert [name for name in names if name.endswith(".data/scripts/lockstep")]
    assert {f"lockstep/liblockstep-{module}.so" for module in ("mpi-mpich", "mpi-openmpi", "ucx")} <= set(names)
    abi = f"{PYTHON}-{PYTHON}" if sys.version_info < (3, 12) else "cp312-abi3"
    (tag,) = [line for line in lines if line.startswith("Tag: ")]
    assert tag.startswith(f"Tag: {abi}-")
    (core,) = [name for name in names if name.startswith("lockstep/_core.") and name.endswith(".so")]
    assert core.endswith(".abi3.so") == (abi == "cp312-abi3")
    assert "License-Expression: Apache-2.0" in lines
    assert not [line for line in lines if line.startswith("Requires-Dist: ") and "; extra ==" not in line]


def test_lockstep_torch_pins_what_it_is_compiled_for(wheels, tmp_path):
    wheel = wheels["lockstep_torch"]
    names, lines = read(wheel)
    (version,) = [line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")]
    assert {f"Requires-Dist: torch=={TORCH}", f"Requires-Dist: lockstep-dist=={version}"} <= set(lines)
    assert f"Build: 1torch{TORCH}" in lines
    (tag,) = [line for line in lines if line.startswith("Tag: ")]
    assert tag.startswith(f"Tag: {PYTHON}-{PYTHON}-")
    assert not [name for name in names if re.match(r"lockstep/|.*lib(torch|c10|lockstep)", name)]
    assert "liblockstep.so" in needed(wheel, tmp_path)


def test_beside_another_torch_is_an_import_error_that_names_both(wheels, tmp_path):
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, *wheels.values()])
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
    printed = run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert str(tmp_path) in printed
    assert f"built for torch {TORCH}, and this is torch 9.8.7" in printed


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """The Python of an environment that has what builds the packages, but no torch."""
    folder = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "build", "scikit-build-core>=1.1", "uv"])
    return str(python)


@pytest.mark.parametrize(
    "front_end",
    [
        "-m pip wheel --no-deps -w OUT",
        "-m pip wheel --no-deps --no-build-isolation -w OUT",
        "-m build -o OUT",
        "-m build --wheel -o OUT",
        "-m build --wheel --no-isolation -o OUT",
        "-m uv build --wheel -o OUT",
        "-m uv pip install --no-deps --target OUT",
        "-m uv pip install --no-deps --no-build-isolation --target OUT",
    ],
)
def test_without_torch_lockstep_torch_is_not_built(front_end, without_torch, tmp_path):
    command = [without_torch, *front_end.replace("OUT", str(tmp_path)).split(), ROOT / "python" / "torch"]
    printed = run(command, code=1, env={**os.environ, "VIRTUAL_ENV": str(Path(without_torch).parents[1])})
    printed = " ".join(printed.split())
    assert "install torch first" in printed and "without build isolation" in printed, printed
    assert not list(tmp_path.glob("*.whl"))


def test_the_source_distribution_of_lockstep_torch_has_what_it_is_compiled_from(tmp_path):
    run([sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, ROOT / "python" / "torch"])
    (sources,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (metadata,) = [name for name in archive.getnames() if name.endswith("/PKG-INFO")]
        lines = archive.extractfile(metadata).read().decode().splitlines()
    assert {"LICENSE", "copyright", "find_torch.py", "lockstep/src/nn/torch_extension/torch_module.cpp", "lockstep/CMakeLists.txt"} <= names
    assert "Dynamic: Requires-Dist" in lines and "Requires-Dist: torch" in lines
    (wheel,) = tmp_path.glob("*.whl")
    assert f"Requires-Dist: torch=={TORCH}" in read(wheel)[1]
