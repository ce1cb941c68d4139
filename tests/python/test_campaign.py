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

class Limit(campaign.Limit):
    is_first = True

    def __init__(self):
        super().__init__()
        self.ends_at_fault, Limit.is_first = Limit.is_first, False

    def is_over(self, ranks):
        return (folder / "fault.json").exists() if self.ends_at_fault else super().is_over(ranks)

folder, campaign.Limit, campaign.LIMIT = pathlib.Path(sys.argv[1]), Limit, 1000
trial = {"scene": "direct", "fault": "stop", "size": 2, "victim": 1, "good_calls": 1, "seed": 1}
print(*campaign.run_trial(trial, folder, collections.defaultdict(list)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "survivors hang, after the fault" in done.stdout, done.stdout
    assert re.search(r"(?s)rank 0:\nFatal Python error: Aborted\n.*, line \d+ in run_rank\n", done.stdout), done.stdout


def test_waits_for_a_processor_do_not_count_as_a_hang(monkeypatch):
    import campaign

    def is_over(elapsed, waits):
        monkeypatch.setattr(campaign, "seconds_without_processor", lambda processes: waits if 0 in processes else 0)
        limit = campaign.Limit()
        limit.began -= elapsed
        return limit.is_over([0])

    assert not is_over(campaign.WATCHDOG / 2, 0)
    assert is_over(2 * campaign.WATCHDOG, 0)
    assert not is_over(2 * campaign.WATCHDOG, 2 * campaign.WATCHDOG)
    assert is_over(5 * campaign.WATCHDOG, 5 * campaign.WATCHDOG)
