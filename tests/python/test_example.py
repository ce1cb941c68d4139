"""The programs of examples/python: several ranks train the network that one rank trains."""

import os
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
