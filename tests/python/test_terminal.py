"""A debugger's prompt at the terminal of `lockstep run`."""

import os
import pty
import select
import sys
import time

import pytest
from conftest import COMMAND

PROGRAM = """
import lockstep as ls
import numpy as np
ls.init_dist()
x = np.array([ls.get_rank() + 1.0])
if ls.get_rank() == {rank}:
    breakpoint()
ls.all_reduce(x)
print(f"sum {{x[0]}}", flush=True)
"""

OF_TORCH = """
import os, torch
torch.distributed.init_process_group("gloo")
x = torch.ones(1)
torch.distributed.breakpoint({rank})
torch.distributed.all_reduce(x)
print(f"sum {{x.item() + 1}}", flush=True)
os._exit(0)  # a thread of Gloo, which a group that has had a breakpoint keeps, may free x while Python ends: SIGABRT
"""


class Terminal:
    """A program in a session of its own, at a terminal."""

    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(NO_COLOR="1", TERM="dumb")
            os.execv(command[0], command)
        self.shown = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def read_until(self, text, times=1):
        end = time.monotonic() + 120  # only a hang takes so long
        while self.shown.count(text) < times:
            assert select.select([self.fd], [], [], end - time.monotonic())[0], f"no '{text}' in: {self.shown}"
            try:
                self.shown += os.read(self.fd, 65536).decode()
            except OSError:  # how a terminal ends
                pytest.fail(f"ended without '{text}': {self.shown}")

    def wait(self):
        try:
            while piece := os.read(self.fd, 65536):
                self.shown += piece.decode()
        except OSError:
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("text", [PROGRAM, OF_TORCH], ids=["breakpoint", "torch.distributed.breakpoint"])
def test_prompt(tmp_path, text, rank):
    if text is OF_TORCH:
        pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(text.format(rank=rank))
    terminal = Terminal(COMMAND, "run", "-n", "2", "--stdin", str(rank), "--", sys.executable, str(program))
    terminal.read_until("(Pdb) ")
    terminal.type("p 6 * 7\n")
    terminal.read_until("42\r\n")
    terminal.type("c\n")
    assert terminal.wait() == 0, terminal.shown
    assert terminal.shown.count("sum 3.0") == 2, terminal.shown


def test_prompt_of_a_rank_that_reads_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(rank=1))
    terminal = Terminal(COMMAND, "run", "-n", "2", "--", sys.executable, str(program))
    assert terminal.wait() != 0
    assert "BdbQuit" in terminal.shown, terminal.shown


def test_a_rank_that_is_killed_leaves_the_terminal_as_it_was():
    raw = "import os, signal, tty; tty.setraw(0); print(1 + 1, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    terminal = Terminal("/bin/sh", "-c", f"{COMMAND} run -n 1 -- {sys.executable} -c '{raw}'; stty -a")
    terminal.wait()
    assert " icanon " in terminal.shown and " echo " in terminal.shown, terminal.shown
