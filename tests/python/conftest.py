"""Ranks are real processes, started by the command that comes with the package."""

import os
import pickle
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks import init_dist

COMMAND = str(Path(sys.executable).parent / "lockstep")


def elastic(n, limits):
    """The command that starts n ranks of which some may be lost."""
    return [COMMAND, "run", "-n", str(n), "--elastic", limits, "--"]


@pytest.fixture
def run_ranks(tmp_path):
    """run_ranks(n, body, **arguments): n ranks call `body`, a function of a test module. Returns what they printed.

    It gets those of the arguments, and of what `init` returns, that it has parameters for. `returned`: the number of ranks
    in which it returns (`code` tells only of the first that fails). `says`: a text that they print, or a list of these.
    `body` may be the text of a program too, for what a function cannot be.
    """

    def run(n, body, *, code=0, launcher=None, env=None, init=init_dist, returned=None, says=(), **arguments):
        if isinstance(body, str):
            command = ["program.py"]
            (tmp_path / "program.py").write_text(textwrap.dedent(body).lstrip("\n"))
        else:
            command = [str(Path(__file__).parent / "in_ranks.py"), "body"]
            (tmp_path / "body").write_bytes(pickle.dumps((body, init, arguments)))
        (tmp_path / "returned").write_text("")
        launcher = [COMMAND, "run", "-n", str(n), "--"] if launcher is None else launcher
        done = subprocess.run(
            [*launcher, sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **(env or {}), "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,  # a watchdog
        )
        assert done.returncode == code, done.stdout
        if returned is not None:
            assert len((tmp_path / "returned").read_text()) == returned, done.stdout
        for text in [says] if isinstance(says, str) else says:
            assert text in done.stdout, done.stdout
        return done.stdout

    return run


def run_elastic_program(name, kills):
    sys.argv = ["elastic_programs.py", name, kills]
    runpy.run_path(str(Path(__file__).parent / "elastic_programs.py"), run_name="__main__")


@pytest.fixture
def elastic_program(run_ranks, tmp_path):
    """elastic_program(name, kills): trains it alone, or as 3 ranks that are killed. Returns its result, and the kills.

    Of two results: difference(a, b).
    """
    torch = pytest.importorskip("torch")

    def run(name, kills=None):
        for path in [*tmp_path.glob("started-*"), *tmp_path.glob("has-state-*"), tmp_path / "kills", tmp_path / "result"]:
            path.unlink(missing_ok=True)
        launcher = [] if kills is None else elastic(3, "1")
        printed = run_ranks(3, run_elastic_program, name=name, kills=kills or "", launcher=launcher, init=None)
        done = (tmp_path / "kills").read_text().splitlines() if (tmp_path / "kills").exists() else []
        return torch.load(tmp_path / "result", weights_only=False), done, printed

    return run


def difference(a, b):
    """The largest between two trainings: parameters, and the log of their epochs."""
    import torch

    if isinstance(a, torch.Tensor):
        return (a.double() - b.double()).abs().max().item()
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max(difference(value, b[name]) for name, value in a.items())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        return max(difference(*each) for each in zip(a, b, strict=True))
    return abs(a - b)


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request):
    """A command that starts two ranks: of each MPI that is here."""
    launcher = shutil.which(f"mpirun.{request.param}")
    if launcher is None:
        pytest.skip(f"no mpirun.{request.param}")
    options = {"openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"], "mpich": []}
    return [launcher, "-n", "2", *options[request.param]]
