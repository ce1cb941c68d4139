"""Random faults, a few of them: LOCKSTEP_FAULT_RUNS is their number, LOCKSTEP_FAULT_SEED chooses others."""

import os
import re
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


def test_stacks_of_a_survivor_that_hangs_are_reported(tmp_path):
    program = """
import collections, pathlib, sys
import campaign

campaign.LIMIT, campaign.WATCHDOG = 1000, 10
trial = {"scene": "direct", "fault": "stop", "size": 2, "victim": 1, "good_calls": 1, "seed": 1}
print(*campaign.run_trial(trial, pathlib.Path(sys.argv[1]), collections.defaultdict(list)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "rank 0 reported nothing" in done.stdout, done.stdout
    assert re.search(r"(?s)rank 0:\nTimeout \(0:00:10\)!\n.*, line \d+ in run_rank\n", done.stdout), done.stdout
