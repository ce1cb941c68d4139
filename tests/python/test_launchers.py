"""The launchers: `lockstep run` is that of all other tests."""

import os
import subprocess
import sys

SUM = """
import os, numpy as np, lockstep as ls
ls.init_dist(backend=os.environ.get("BACKEND", "auto"), timeout=60)
x = np.array([ls.get_rank() + 1.0])
ls.all_reduce(x)
assert x[0] == 3 and ls.get_world_size() == 2
assert ls.all_gather_object(ls.get_rank()) == [0, 1]
print(ls.infer_launcher(), ls.get_backend(), flush=True)
"""


def test_variables_of_torchrun(tmp_path):
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getpid() % 12000}  # fmt: skip
        env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, "-c", SUM]
        ranks.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    for rank in ranks:
        output, _ = rank.communicate(timeout=240)
        assert (rank.returncode, output) == (0, "pytorch shared\n")


def test_mpirun_and_the_mpi_engine(run_ranks, tmp_path, mpirun):
    env = {**os.environ, "BACKEND": "mpi"}
    # To a file each: in mpirun's own output the ranks' lines may break in the middle.
    ranks = [*mpirun, "sh", "-c", 'exec "$@" >$$.said', "sh"]
    run_ranks(2, SUM, launcher=ranks, env=env, prelude="")
    assert [path.read_text() for path in tmp_path.glob("*.said")] == ["mpi mpi\n"] * 2
