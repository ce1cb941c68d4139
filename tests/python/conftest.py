"""Ranks are real processes, started by the command that comes with the package."""

import contextlib
import itertools
import os
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from multiprocessing.connection import Listener, wait
from pathlib import Path

import pytest
from ranks import init_dist

COMMAND = str(Path(sys.executable).parent / "lockstep")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]


def elastic(n, limits):
    """The command that starts n ranks of which some may be lost."""
    return [COMMAND, "run", "-n", str(n), "--elastic", limits, "--"]


def over_nodes(n_nodes, n, *options):
    """The command that starts n ranks on each of n_nodes nodes."""
    return [sys.executable, str(Path(__file__).parent / "over_nodes.py"), str(n_nodes), "-n", str(n), *options, "--"]


def elastic_nodes(n_nodes, n, limits):
    return over_nodes(n_nodes, n, "--elastic", limits, "--elastic-lease", "2")


# AddressSanitizer takes a few times as long: an elastic test of seconds took 173 s at a load of 12.
WATCHDOG_S = 900 if "libasan" in os.environ.get("LD_PRELOAD", "") else 240


PORTS = (n % 1000 for n in itertools.count(os.getpid()))


def next_port():
    """Of a store: below those that the kernel gives to connections, among which is rank 1's before rank 0 listens; and none
    of the next twelve workers'."""
    first = 20_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12)
    while True:
        port = first + next(PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


class SharedRanks:
    """Processes under `lockstep run` that are the ranks of many tests, one after the other, each in a new world: of a test
    of 2 ranks, 4 seconds of 5 are the import of torch.
    """

    def __init__(self, n):
        self.folder = tempfile.TemporaryDirectory()
        path = str(Path(self.folder.name) / "tasks")
        with Listener(path, backlog=n) as listener, open(Path(self.folder.name) / "output", "wb") as output:
            self.launcher = subprocess.Popen(
                [COMMAND, "run", "-n", str(n), "--", sys.executable, str(Path(__file__).parent / "in_ranks.py"), path],
                cwd=self.folder.name,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            listener._listener._socket.settimeout(WATCHDOG_S)  # type: ignore[attr-defined]
            self.ranks = [listener.accept() for _ in range(n)]

    def run(self, folder):
        """Whether all ranks of the test in `folder` returned."""
        port = next_port()
        for rank in self.ranks:
            rank.send((str(folder), port))
        running = list(self.ranks)
        while running:
            ready = wait(running, WATCHDOG_S)
            if not ready:
                self.launcher.send_signal(signal.SIGUSR1)  # `lockstep run` forwards it: the ranks print where they are
                wait(running, 5)
                return False
            for rank in ready:
                try:
                    rank.recv()
                except (EOFError, ConnectionError):
                    return False
                running.remove(rank)
        return True

    def end(self):
        for rank in self.ranks:
            rank.close()
        try:
            self.launcher.wait(10)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()
        return (Path(self.folder.name) / "output").read_text(errors="replace")


@pytest.fixture(scope="session")
def shared_ranks():
    """shared_ranks(n): of the last two numbers that were asked for."""
    kept = {}

    def get(n, is_bad=False):
        if is_bad:
            return kept.pop(n).end()
        kept[n] = kept.pop(n, None) or SharedRanks(n)
        if len(kept) > 2:
            kept.pop(next(iter(kept))).end()
        return kept[n]

    yield get
    for ranks in kept.values():
        ranks.end()


@pytest.fixture
def run_ranks(tmp_path, shared_ranks, request):
    """run_ranks(n, body, **arguments): n ranks call `body`, a function of a test module. Returns what they printed.

    It gets those of the arguments, and of what `init` returns, that it has parameters for. `returned`: the number of ranks
    in which it returns (`code` tells only of the first that fails). `says`: a text that they print, or a list of these.
    `body` may be the text of a program too, for what a function cannot be.

    `shares=False`: in processes of its own, as it leaves something behind in them or is about their end. So are those with
    a launcher, variables or an exit code, and in nightly, which selects no marks, all.
    """

    def start(n, command, code, launcher, env):
        launcher = [COMMAND, "run", "-n", str(n), "--"] if launcher is None else launcher
        done = subprocess.run(
            [*launcher, sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **(env or {}), "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WATCHDOG_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def share(n):
        if not shared_ranks(n).run(tmp_path):
            pytest.fail(Path(tmp_path / "output").read_text(errors="replace") + shared_ranks(n, is_bad=True), pytrace=False)
        return (tmp_path / "output").read_text(errors="replace")

    def run(n, body, *, code=0, launcher=None, env=None, init=init_dist, returned=None, says=(), shares=True, **arguments):
        (tmp_path / "output").unlink(missing_ok=True)
        if isinstance(body, str):
            command = ["program.py"]
            (tmp_path / "program.py").write_text(textwrap.dedent(body).lstrip("\n"))
        else:
            command = [str(Path(__file__).parent / "in_ranks.py"), "body"]
            (tmp_path / "body").write_bytes(pickle.dumps((body, init, arguments)))
        (tmp_path / "returned").write_text("")
        is_plain = not isinstance(body, str) and code == 0 and launcher is None and env is None
        if shares and is_plain and request.config.option.markexpr:
            printed = share(n)
        else:
            printed = start(n, command, code, launcher, env)
        if returned is not None:
            assert len((tmp_path / "returned").read_text()) == returned, printed
        for text in [says] if isinstance(says, str) else says:
            assert text in printed, printed
        return printed

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
def mpirun(request, tmp_path_factory):
    """A command that starts two ranks: of each MPI that is here."""
    launcher = shutil.which(f"mpirun.{request.param}")
    if launcher is None:
        pytest.skip(f"no mpirun.{request.param}")
    # Two at once that make their common session folder fail.
    sessions = ["--mca", "orte_tmpdir_base", str(tmp_path_factory.mktemp("mpi"))] if request.param == "openmpi" else []
    options = {"openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *sessions], "mpich": []}
    return [launcher, "-n", "2", *options[request.param]]
