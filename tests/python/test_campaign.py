"""Random faults, a few of them: LOCKSTEP_FAULT_RUNS is their number, LOCKSTEP_FAULT_SEED chooses others."""

import collections
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import difference

pytest.importorskip("torch")


def test_survivors_name_the_rank_and_the_line():
    n = os.environ.get("LOCKSTEP_FAULT_RUNS", "10")
    command = [sys.executable, Path(__file__).parent / "campaign.py", "--faults", n]
    command += ["--seed", os.environ.get("LOCKSTEP_FAULT_SEED", "1")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout


def stop_for_long():
    import campaign

    campaign.LIMIT, campaign.WATCHDOG = 1000, 10
    trial = {"scene": "direct", "fault": "stop", "size": 2, "victim": 1, "good_calls": 1, "seed": 1}
    print(*campaign.run_trial(trial, Path.cwd(), collections.defaultdict(list)))


def test_stacks_of_a_survivor_that_hangs_are_reported(run_ranks):
    printed = run_ranks(1, stop_for_long, launcher=[], init=None, says="rank 0 reported nothing")
    assert re.search(r"(?s)rank 0:\nTimeout \(0:00:10\)!\n.*, line \d+ in run_rank\n", printed), printed


def test_trainings_go_on_after_random_kills(elastic_program):
    """All programs of elastic_programs.py in turn, four kills in each, until there were as many as LOCKSTEP_FAULT_RUNS."""
    from test_torch_elastic import KILLS

    wanted = int(os.environ.get("LOCKSTEP_FAULT_RUNS", "4"))
    rng = random.Random(int(os.environ.get("LOCKSTEP_FAULT_SEED", "1")))
    n_kills = n_generations = 0
    largest, alone = 0.0, {}
    for name in itertools.cycle(rng.sample(sorted(KILLS), len(KILLS))):
        seed = rng.randrange(1 << 30)
        if name not in alone:
            alone[name] = elastic_program(name)[0]
        result, kills, printed = elastic_program(name, f"random:{seed}:4")
        n_kills += len(kills)
        n_generations += len(re.findall(r"lockstep: .*generation \d+: ", printed))
        distance = difference(alone[name], result)
        largest = max(largest, distance)
        print(f"{name}, random:{seed}:4: difference {distance:.1e} after {'; '.join(kills)}")
        assert distance < 1e-9, printed
        if n_kills >= wanted:
            break
    print(f"{n_kills} kills, {n_generations} generations, largest difference {largest:.1e}")
