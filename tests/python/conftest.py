"""Ranks are real processes, started by the command that comes with the package."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "lockstep")

# One line, so that line N of a test's program is line N + 1 of its file.
PRELUDE = (
    "import os, signal, sys, threading, time; import numpy as np; import lockstep as ls; from ranks import raises; "
    "ls.init_dist(timeout=60); rank, size = ls.get_dist_info()\n"
)
TORCH_PRELUDE = (
    "import os, signal, sys, threading, time; import torch, torch.distributed as dist; from ranks import raises; "
    "dist.init_process_group('lockstep'); rank, size = dist.get_rank(), dist.get_world_size()\n"
)

# The ranks of layers, by what their messages go through: a lockstep.Group, or a process group of Gloo or of lockstep.
WORLDS = {
    "no torch.distributed": (
        "ls.init_dist(timeout=60); rank, size = ls.get_dist_info(); sum_over_ranks, barrier = ls.all_reduce, ls.barrier"
    ),
    **{
        backend: (
            f"dist.init_process_group('{backend}'); rank, size = dist.get_rank(), dist.get_world_size(); "
            # Without it torch may end a process with std::terminate.
            "import atexit; atexit.register(dist.destroy_process_group); "
            "sum_over_ranks, barrier = dist.all_reduce, dist.barrier"
        )
        for backend in ["gloo", "lockstep"]
    },
}


def in_a_file(name="store"):
    """For a program's second default group a store of its own.

    Rank 0's server of the first one ends with that group, at a moment that the other ranks do not know: one that asks it
    for the second group loses the connection.
    """
    return f"init_method=f'file://{{os.getcwd()}}/{name}', rank=rank, world_size=size"


def survivor(fault, call, error, *texts, before="pass"):
    """A program for run_ranks: rank 1 does `fault`; in `call` the others raise `error`, whose text has `texts`."""
    return f"""
import lockstep as ls
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
{textwrap.dedent(before)}
if rank == 1:
    {fault}
try:
    {call}
    raise AssertionError
except ls.{error} as error:
    for text in {texts!r}:
        assert text in str(error), error
    line = open(error.filename).readlines()[error.lineno - 1]
    assert line.strip() == {call!r}, line
print("heard")
"""


@pytest.fixture
def run_ranks(tmp_path):
    """run_ranks(n, program, code=0): runs it as n ranks, checks the exit code, returns what they printed."""

    def run(n, program, code=0, launcher=None, env=None, prelude=PRELUDE):
        path = tmp_path / "program.py"
        path.write_text(prelude + textwrap.dedent(program).lstrip("\n"))
        launcher = [COMMAND, "run", "-n", str(n), "--"] if launcher is None else launcher
        done = subprocess.run(
            [*launcher, sys.executable, str(path)],
            cwd=tmp_path,
            env={**(env or os.environ), "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,  # a watchdog
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


@pytest.fixture
def run_torch(run_ranks):
    """run_ranks for a program that has torch's `dist`, over lockstep."""
    return lambda n, program, **options: run_ranks(n, program, **{"prelude": TORCH_PRELUDE, **options})


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


@pytest.fixture
def run_layers(run_ranks, world):
    """run_ranks for a program of layers, over each of WORLDS."""
    prelude = (
        "import copy, os, signal, sys, time; import torch, torch.distributed as dist; from torch import nn; "
        "import lockstep as ls, lockstep.nn; from ranks import OverRanks, own_group, raises; "
        f"torch.set_num_threads(1); torch.manual_seed(0); {WORLDS[world]}; "
        "compare = OverRanks(rank, sum_over_ranks).compare; converted = lambda plain: ls.nn.convert_sync_batchnorm(copy.deepcopy(plain))\n"
    )
    return lambda n, program, **options: run_ranks(n, program, **{"prelude": prelude, **options})


@pytest.fixture
def elastic_program(run_ranks, tmp_path):
    """elastic_program(name, kills): trains it alone, or as 3 ranks that are killed. Returns its result, and the kills.

    Of two results: difference(a, b).
    """
    torch = pytest.importorskip("torch")

    def run(name, kills=None):
        for path in [*tmp_path.glob("started-*"), *tmp_path.glob("has-state-*"), tmp_path / "kills", tmp_path / "result"]:
            path.unlink(missing_ok=True)
        program = f"""
        import runpy, sys
        sys.argv = ["elastic_programs.py", {name!r}, {kills or ""!r}]
        runpy.run_path({str(Path(__file__).parent / "elastic_programs.py")!r}, run_name="__main__")
        """
        launcher = [] if kills is None else [COMMAND, "run", "-n", "3", "--elastic", "1", "--"]
        printed = run_ranks(1 if kills is None else 3, program, prelude="", launcher=launcher)
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
