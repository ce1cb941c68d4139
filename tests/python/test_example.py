"""The programs of examples/python: several ranks train the network that one rank trains."""

import difflib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMMAND

torch = pytest.importorskip("torch")

TRAIN = str(Path(__file__).parents[2] / "examples/python/train.py")
LAUNCHERS = {
    "alone": [sys.executable],
    "lockstep": [COMMAND, "run", "-n", "4", "--", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
}


def trained(tmp_path, launcher):
    path = tmp_path / f"{launcher}.pt"
    done = subprocess.run(
        # Batches of 90 images: parts of 23 and of 22.
        [*LAUNCHERS[launcher], TRAIN, "--epochs", "1", "--batch", "90", "--precision", "float64", "--save", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,  # a watchdog
    )
    assert done.returncode == 0, done.stdout
    assert "epoch 1: " in done.stdout
    return torch.load(path)


def test_four_ranks_train_as_one(tmp_path):
    alone = trained(tmp_path, "alone")
    for launcher in "lockstep", "torchrun":
        together = trained(tmp_path, launcher)
        assert together.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(together[name], expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_ranks_of_which_one_is_lost_train_as_one():
    program = str(Path(TRAIN).parent / "elastic.py")
    run = [COMMAND, "run", "-n", "4", "--elastic", "2", "--", sys.executable, program]
    sums = []
    for command in [sys.executable, program], run:
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        last = done.stdout.splitlines()[-1]
        assert last.startswith("step 40: ")
        sums.append(float(last.split()[-1]))
    assert "rank 1" in done.stderr and "SIGKILL" in done.stderr
    assert abs(sums[0] - sums[1]) < 1e-9


def changes():
    """From usual.py to usual_elastic.py, without their first comments."""
    before, after = ((Path(TRAIN).parent / name).read_text().split('"""', 2)[2].splitlines() for name in ("usual.py", "usual_elastic.py"))
    return list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]


def test_the_changes_that_a_usual_program_needs_are_those_of_the_page():
    page = (Path(TRAIN).parents[2] / "docs/howto/elastic.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
    assert shown == [line for line in changes() if not line.startswith("@@")]
    assert sum(line.startswith("+") for line in shown) <= 15 and sum(line.startswith("-") for line in shown) <= 15


def test_a_usual_program_and_its_elastic_form_train_the_same(tmp_path):
    """The elastic one loses a rank after its second epoch; started again, it finds that it is complete."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(name, *options):
        command = [COMMAND, "run", "-n", "4", *options, "--", sys.executable, str(Path(TRAIN).parent / name)]
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def epochs(text):
        return sorted(set(line for line in text.splitlines() if line.startswith("epoch ")))

    usual, errors = start("usual.py").communicate(timeout=600)
    expected = torch.load(tmp_path / "usual.pt")
    assert len(epochs(usual)) == 6, errors
    job = start("usual_elastic.py", "--elastic", "2")
    printed = job.stdout.readline() + job.stdout.readline()
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    victim = next(int(rank) for rank in ranks if b"RANK=1" in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0"))
    os.kill(victim, signal.SIGKILL)
    rest, errors = job.communicate(timeout=600)
    assert job.returncode == 0 and "was killed by SIGKILL" in errors, errors
    assert epochs(printed + rest) == epochs(usual)
    for name, value in torch.load(tmp_path / "usual.pt").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    again, errors = start("usual_elastic.py", "--elastic", "2").communicate(timeout=600)
    assert epochs(again) == [], errors
