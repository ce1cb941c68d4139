"""Ranks are real processes, started by the command that comes with the package."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "lockstep")

# One line, so that line N of a test's program is line N + 1 of its file.
PRELUDE = (
    "import os, signal, sys, threading, time; import numpy as np; import lockstep as ls; "
    "ls.init_dist(timeout=60); rank, size = ls.get_dist_info()\n"
)


@pytest.fixture
def run_ranks(tmp_path):
    """run_ranks(n, program, code=0): runs it as n ranks, checks the exit code, returns what they printed."""

    def run(n, program, code=0, launcher=None, env=None, prelude=PRELUDE):
        path = tmp_path / "program.py"
        path.write_text(prelude + textwrap.dedent(program).lstrip("\n"))
        launcher = launcher or [COMMAND, "run", "-n", str(n), "--"]
        done = subprocess.run(
            [*launcher, sys.executable, str(path)],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,  # a watchdog
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run
