#!/usr/bin/env python3
"""Random faults in ranks of Python programs: what each survivor is told, and how soon.

usage: campaign.py [--faults 10] [--seed 1] [--only N]

The ranks are forks of this process. In each trial one of them does something wrong in lockstep.all_reduce and
its like, in those of torch.distributed, or in the backward of DistributedDataParallel. A survivor must get
an error of the right class, with the line of its own call, that names the rank. Prints a table of the times from
the fault (or from the end of the timeout that it makes others wait for) to the error; ends with 1 if a survivor
was told something else, if it hangs (then with the stacks of its threads), or if something remains in /dev/shm.
--only runs trial N alone, the one that is printed with the number 1000 * seed + N.
"""

import argparse
import atexit
import collections
import datetime
import faulthandler
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

# DistributedDataParallel imports them, which takes seconds of processor time: once here, not in each rank of a trial.
import torch._dynamo.utils
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls

LIMIT = 2.0  # seconds, of a call
WATCHDOG = 600  # seconds, of a rank: as that of the ranks of C++ tests
CLASSES = {
    "kill": {"PeerLost"},
    "exit": {"PeerLost"},
    "leave": {"PeerLost"},
    "exception": {"PeerFailed"},
    "stop": {"TimeoutError"},
    "slow": {"TimeoutError"},
    "operation": {"MismatchError"},
    "missing": {"MismatchError"},
    "shape": {"MismatchError"},
    "dtype": {"MismatchError"},
    "root": {"MismatchError"},
}
WRONG_CALLS = ("operation", "missing", "shape", "dtype", "root")
IN_BACKWARD = ("kill", "exit", "leave", "exception", "stop", "slow", "missing")


class Direct:
    """lockstep's own functions, on the world."""

    def __init__(self, folder, rank, size, seed):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID=folder.name)  # fmt: skip
        ls.init_dist()
        self.timeout = None

    def all_reduce(self, n=100, dtype="float64"):
        ls.all_reduce(np.ones(n, dtype), timeout=self.timeout)

    def broadcast(self, root=0):
        ls.broadcast(np.ones(10), root, timeout=self.timeout)

    def barrier(self):
        ls.barrier(timeout=self.timeout)

    def limit(self):
        self.timeout = LIMIT


class Torch:
    """torch.distributed."""

    def __init__(self, folder, rank, size, seed):
        dist.init_process_group("lockstep", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        self.is_async = random.Random(seed).random() < 0.5

    def all_reduce(self, n=100, dtype="float64"):
        x = torch.ones(n, dtype=getattr(torch, dtype))
        if self.is_async:
            dist.all_reduce(x, async_op=True).wait()
        else:
            dist.all_reduce(x)

    def broadcast(self, root=0):
        dist.broadcast(torch.ones(10), root)

    def barrier(self):
        dist.barrier()

    def limit(self):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend.set_timeout(datetime.timedelta(seconds=LIMIT))


class Backward(Torch):
    """An all_reduce is the backward of a model."""

    def __init__(self, folder, rank, size, seed):
        super().__init__(folder, rank, size, seed)
        self.model = DistributedDataParallel(torch.nn.Linear(8, 8))
        self.in_backward = lambda: None
        self.model.module.bias.register_hook(lambda gradient: self.in_backward())

    def all_reduce(self):
        loss = self.model(torch.ones(2, 8)).sum()
        loss.backward()


SCENES = {"direct": Direct, "torch": Torch, "backward": Backward}


def end(code):
    atexit._run_exitfuncs()
    os._exit(code)


def say(path, **what):
    """Whole or not at all."""
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)


def fail(fault):
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exit":
        os._exit(3)
    elif fault == "leave":
        end(0)
    elif fault == "exception":
        raise ValueError("a bad batch")
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "slow":
        time.sleep(2 * LIMIT)


def call_wrongly(calls, fault):
    if fault == "operation":
        calls.barrier()
    elif fault == "missing":
        calls.broadcast()
    elif fault == "shape":
        calls.all_reduce(n=101)
    elif fault == "dtype":
        calls.all_reduce(dtype="float32")
    elif fault == "root":
        calls.broadcast(root=1)


def run_rank(trial, rank, folder):
    report = folder / f"{rank}.json"
    calls: Any = SCENES[trial["scene"]](folder, rank, trial["size"], trial["seed"])
    for _ in range(trial["good_calls"]):
        calls.all_reduce()
        calls.broadcast()
    calls.limit()
    is_victim, fault = rank == trial["victim"], trial["fault"]
    began = time.monotonic()
    try:
        if not is_victim:
            if fault == "root":
                calls.broadcast()
            else:
                calls.all_reduce()
            calls.broadcast()
        elif fault in WRONG_CALLS:
            say(folder / "fault.json", at=time.monotonic())
            call_wrongly(calls, fault)
        else:

            def fault_now():
                say(folder / "fault.json", at=time.monotonic())
                fail(fault)

            if trial["scene"] == "backward":
                calls.in_backward = fault_now
            else:
                fault_now()
            calls.all_reduce()
        say(report, error="none", text="", lineno=0, line=0, began=began, at=time.monotonic())
    except ls.Error as error:
        at = time.monotonic()
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == __file__][-1]
        where = error.lineno if error.filename == __file__ else 0
        say(report, error=type(error).__name__, text=str(error), lineno=where, line=line, began=began, at=at)


def start_rank(trial, rank, folder):
    child = os.fork()
    if child != 0:
        return child
    code = 1
    try:
        os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
        faulthandler.enable()
        faulthandler.dump_traceback_later(WATCHDOG, exit=True)
        torch.set_num_threads(1)
        run_rank(trial, rank, folder)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        end(code)


def run_ranks(trial, folder):
    ranks = {rank: start_rank(trial, rank, folder) for rank in range(trial["size"])}
    victim = ranks.pop(trial["victim"])
    for child in ranks.values():
        os.waitpid(child, 0)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)


def problem_of(trial, rank, report, victim):
    """What is wrong with what a survivor was told; None if nothing is."""
    if report["error"] not in CLASSES[trial["fault"]]:
        return f"got {report['error']}"
    names = re.search(rf"(?m)\branks? (\d+, )*{trial['victim']}\b|^ +(\d+, )*{trial['victim']}(, \d+)* +\w", report["text"])
    if not names:
        return "the rank is not named"
    if report["lineno"] != report["line"]:
        return f"names line {report['lineno']}, and the call is in line {report['line']}"
    if victim and trial["fault"] in WRONG_CALLS and f"campaign.py:{victim['line']}" not in report["text"]:
        return f"does not name line {victim['line']} of the wrong call"
    return None


def run_trial(trial, folder, times):
    """Returns the problems; adds the survivors' times, in seconds."""
    run_ranks(trial, folder)
    logs = "\n".join(f"rank {path.stem}:\n{path.read_text()}" for path in sorted(folder.glob("*.log")))
    if not (folder / "fault.json").exists():
        return [f"failed before the fault:\n{logs}"]
    reports = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9].json")}
    at = json.loads((folder / "fault.json").read_text())["at"]
    problems = []
    for rank in set(range(trial["size"])) - {trial["victim"]}:
        if rank not in reports:
            problems.append(f"rank {rank} reported nothing:\n{logs}")
            continue
        report = reports[rank]
        waits = LIMIT if trial["fault"] in ("stop", "slow") else 0
        times[trial["fault"]].append(report["at"] - max(at, report["began"]) - waits)
        problem = problem_of(trial, rank, report, reports.get(trial["victim"]))
        if problem:
            problems.append(f"rank {rank}: {problem}:\n{report['text']}")
    return problems


def segments():
    return {path.name for path in Path("/dev/shm").iterdir() if "lockstep" in path.name}


def without_owner(names):
    """Those that no process has mapped."""
    mapped = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += path.read_text()
        except OSError:
            continue  # it has ended
    return {name for name in names if name not in mapped}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="N")
    options = parser.parse_args()
    rng, times, n_bad = random.Random(options.seed), collections.defaultdict(list), 0
    before = segments()
    all_trials = [(scene, fault) for scene in SCENES for fault in (IN_BACKWARD if scene == "backward" else CLASSES)]
    order = []
    wanted = range(options.faults) if options.only is None else range(options.only, options.only + 1)
    for i in range(wanted.stop):
        if not order:
            order = rng.sample(all_trials, len(all_trials))  # each as often as the others
        scene, fault = order.pop()
        size = rng.randint(2, 4)
        trial = {"scene": scene, "fault": fault, "size": size, "victim": rng.randrange(size),
                 "good_calls": rng.randint(1, 20), "seed": options.seed * 1000 + i}  # fmt: skip
        if i not in wanted:
            continue
        folder = Path(tempfile.mkdtemp(prefix="campaign-"))  # TemporaryDirectory's would end with the first rank
        problems = run_trial(trial, folder, times)
        shutil.rmtree(folder)
        n_bad += bool(problems)
        for problem in problems:
            print(f"FAILED {trial}: {problem}", flush=True)
    print(f"{'fault':10} {'survivors':>9} {'median ms':>9} {'worst ms':>9} {'> 1 s':>6}")
    for fault, seconds in sorted(times.items()):
        late = sum(each > 1 for each in seconds)
        print(f"{fault:10} {len(seconds):9} {1e3 * statistics.median(seconds):9.1f} {1e3 * max(seconds):9.1f} {late:6}")
    left = without_owner(segments() - before)
    if left:
        print(f"FAILED: remain in /dev/shm: {', '.join(sorted(left))}")
    print(f"{len(wanted)} faults, seed {options.seed}: {n_bad} of them not told right")
    return n_bad > 0 or bool(left)


if __name__ == "__main__":
    sys.exit(main())
