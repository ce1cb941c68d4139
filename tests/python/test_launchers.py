"""The launchers: `lockstep run` is that of all other tests."""

import numpy as np
from conftest import next_port

import lockstep as ls


def add(backend, launched, engine):
    ls.init_dist(backend=backend, timeout=60)
    x = np.array([ls.get_rank() + 1.0])
    ls.all_reduce(x)
    assert x[0] == 3 and ls.get_world_size() == 2
    assert ls.all_gather_object(ls.get_rank()) == [0, 1]
    assert (ls.infer_launcher(), ls.get_backend()) == (launched, engine)


VARIABLES = f"""
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={next_port()}
RANK=0 LOCAL_RANK=0 "$@" & RANK=1 LOCAL_RANK=1 "$@" && wait $!
"""


def test_variables_of_torchrun(run_ranks):
    run_ranks(2, add, backend="auto", launched="pytorch", engine="shared", launcher=["sh", "-c", VARIABLES, "sh"], init=None, returned=2)


def test_mpirun_and_the_mpi_engine(run_ranks, mpirun):
    run_ranks(2, add, backend="mpi", launched="mpi", engine="mpi", launcher=mpirun, init=None, returned=2)
