"""torchft over lockstep: the program of docs/howto/frameworks.md, whose replicas are killed and started again."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

PAGE = (Path(__file__).parents[2] / "docs/howto/frameworks.md").read_text()
(PROGRAM,) = re.findall(r"^## torchft\n.*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# A line for each step that was committed: its number, and a hash of parameters and of the optimizer's momenta.
NOTE = """
import hashlib, os
states = open(f"states-{os.environ['REPLICA']}", "a", buffering=1)
def note():
    tensors = [*model.parameters(), *(state["momentum_buffer"] for state in sgd.state.values())]
    state = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    states.write(f"{manager.current_step()} {state} {manager.num_participants()}\\n")
"""
N_REPLICAS, N_KILLS, LIMIT_S = 3, 100, 3600


class Replica:
    def __init__(self, folder, number, lighthouse):
        self.folder, self.number, self.lighthouse = folder, number, lighthouse
        self.states = folder / f"states-{number}"
        self.start()

    def start(self):
        self.n_before = len(self.lines())
        with open(self.folder / f"output-{self.number}", "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "program.py"],
                cwd=self.folder,
                env={**os.environ, "TORCHFT_LIGHTHOUSE": self.lighthouse, "REPLICA": str(self.number), "STEPS": str(10**9)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def lines(self):
        return self.states.read_text().splitlines() if self.states.exists() else []

    def kill(self):
        self.process.kill()
        self.process.wait()

    def takes_part(self):
        """Whether it has committed a step with others since it was started."""
        assert self.process.poll() is None, (self.folder / f"output-{self.number}").read_text()[-5000:]
        return any(not line.endswith(" 1") for line in self.lines()[self.n_before :])


def test_a_hundred_kills_of_replicas_of_torchft(tmp_path):
    coordination = pytest.importorskip("torchft.coordination")
    program = PROGRAM.replace("    optimizer.step()\n", "    optimizer.step()\n    note()\n")
    assert "note()" in program
    (tmp_path / "program.py").write_text(NOTE + program)
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    address = lighthouse.address()
    replicas = [Replica(tmp_path, r, address) for r in range(N_REPLICAS)]
    choose, end = random.Random(1), time.monotonic() + LIMIT_S
    try:
        for n_killed in range(N_KILLS + 1):
            # Two that take part at each kill: a state is never lost with the last that has it.
            while sum(replica.takes_part() for replica in replicas) < 2 + (n_killed == N_KILLS):
                assert time.monotonic() < end, f"hangs after {n_killed} kills"
                time.sleep(0.02)
            if n_killed < N_KILLS:
                victim = choose.choice(replicas)
                victim.kill()
                victim.start()
    finally:
        for replica in replicas:
            replica.kill()
        lighthouse.shutdown()
    states, n_common = {}, 0
    for replica in replicas:
        for line in replica.lines():
            if not re.fullmatch(r"\d+ [0-9a-f]{64} \d", line):
                continue  # what a kill has cut
            step, state, _ = line.split()
            n_common += step in states
            assert states.setdefault(step, state) == state, f"replica {replica.number} has another state after step {step}"
    assert n_common > N_KILLS
    print(f"{N_KILLS} kills, {len(states)} steps, {n_common} states compared")
