"""Random faults, a few of them: LOCKSTEP_FAULT_RUNS is their number, LOCKSTEP_FAULT_SEED chooses others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_survivors_name_the_rank_and_the_line():
    n = os.environ.get("LOCKSTEP_FAULT_RUNS", "10")
    command = [sys.executable, Path(__file__).parent / "campaign.py", "--faults", n]
    command += ["--seed", os.environ.get("LOCKSTEP_FAULT_SEED", "1")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
