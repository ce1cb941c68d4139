"""How the ranks of torch.distributed start, and where."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import COMMAND, TORCHRUN, over_nodes
from ranks import in_a_file, init_torch, on_ranks, on_torch_ranks, raises, wait_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import lockstep  # noqa: E402


@on_torch_ranks(2, launcher=TORCHRUN)
def test_torchrun():
    x = torch.ones(2)
    dist.all_reduce(x)
    assert (x == 2).all()
    dist.destroy_process_group()
    dist.init_process_group("lockstep")
    dist.all_reduce(x)
    assert (x == 4).all()


def sum_in_a_child(rank, store):
    dist.init_process_group("lockstep", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
    dist.destroy_process_group()


@on_ranks(1, launcher=[], init=None)
def test_spawn():
    for method in "spawn", "fork":
        mp.start_processes(sum_in_a_child, args=(Path(method).absolute(),), nprocs=2, start_method=method)


def init_twice(size):
    assert "RANK" not in os.environ
    dist.init_process_group("lockstep", init_method="lockstep://")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()

    import lockstep.torch  # and as torchrun starts it

    lockstep.torch.set_environment()
    assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    dist.init_process_group("lockstep")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size() == size
    dist.destroy_process_group()


def test_mpirun(run_ranks, mpirun):
    run_ranks(2, init_twice, size=2, launcher=mpirun, init=None, returned=2)


def test_srun(run_ranks, tmp_path):
    script = Path(__file__).parent.parent / "cli" / "slurm_cluster.sh"
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("srun", "slurmctld", "munged")):
        pytest.skip("no root, or no Slurm")
    folder = tmp_path / "slurm"
    cluster = subprocess.Popen(["bash", script, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert cluster.stdout.readline() == "ready\n"
        env = {"SLURM_CONF": str(folder / "slurm.conf")}
        run_ranks(2, init_twice, size=2, launcher=["srun", "-n", "2"], env=env, init=None, returned=2)
    finally:
        cluster.terminate()
        cluster.wait()


def test_alone(run_ranks):
    run_ranks(1, init_twice, size=1, launcher=[], init=None, returned=1)


@on_ranks(1, launcher=[], init=None)
def test_without_a_launcher_torch_says_what_it_misses():
    with raises(ValueError, "RANK expected"):
        dist.init_process_group("lockstep")


@on_torch_ranks(2, shares=False)
def test_beside_a_backend_that_this_torch_lacks(rank):
    dist.destroy_process_group()
    if dist.is_nccl_available():
        sys.exit(0)
    with raises(RuntimeError, "NCCL"):
        dist.init_process_group("cpu:lockstep,cuda:nccl", **in_a_file(rank))


def use_two_engines(rank, size):
    for _ in range(3):
        x = torch.full((1000,), rank + 1.0)
        dist.all_reduce(x)
        assert (x == 6).all()
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [p[0].item() for p in parts] == [0, 1, 2]
    if rank == 0:
        dist.send(torch.full((1,), 5.0), 2)
    if rank == 2:
        x = torch.empty(1)
        dist.recv(x, 0)
        assert x.item() == 5
    dist.barrier()
    dist.destroy_process_group()


def test_hosts(run_ranks):
    """Ranks in PID namespaces of their own share no memory, as on another host: Gloo between them."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    apart = ["sh", "-c", '[ "$RANK" != 2 ] || exec unshare --pid --fork --kill-child "$@"; exec "$@"', "sh"]
    launcher = [COMMAND, "run", "-n", "3", "--", *apart]
    run_ranks(3, use_two_engines, launcher=launcher, init=init_torch, env={"GLOO_SOCKET_IFNAME": "lo"})


def end_while_connecting(port):
    from lockstep import _backend

    _backend._CONNECT_TIME = timedelta(seconds=0.5)
    store, why = _backend._connect("127.0.0.1", port, 2)
    assert store is None and why == "no answer", (store, why)
    Path("connecting").touch()


def test_a_rank_may_end_while_it_connects_to_a_store_that_is_gone(run_ranks, tmp_path):
    """As a survivor that has no other rank to wait for; its store's answer is that the connection ends."""

    def answer():
        accepted, _ = server.accept()
        wait_for(tmp_path / "connecting")
        accepted.close()
        server.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        run_ranks(1, end_while_connecting, port=server.getsockname()[1], launcher=[], init=None)


@on_ranks(3, init=None)
def test_groups_of_the_same_number_after_another_init():
    """The store outlives the world: a rank that was not in the earlier group of that number is in the next."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, rank == 0)
    for members in [0, 1], [1, 2], [0, 1, 2]:
        dist.init_process_group("lockstep", store=store, rank=rank, world_size=3)
        group = dist.new_group(members)
        if rank in members:
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            assert x.item() == len(members)
        dist.barrier()
        dist.destroy_process_group()
    # Rank 0's store ends last.
    store.add("ended", 1)
    while rank == 0 and store.add("ended", 0) < 3:
        time.sleep(0.01)


@on_ranks(2, init=None)
def test_top_shows_the_ranks_of_torch():
    """They share memory of their own, beside that which `lockstep run` has made, which they have used before."""
    lockstep.init_dist()
    lockstep.barrier()
    lockstep.destroy_dist()
    init_torch()
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        for job in (os.getppid(), os.getpid()):
            shown = json.loads(subprocess.run([COMMAND, "top", "--json", str(job)], capture_output=True, check=True).stdout)
            assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
            assert "all_reduce" in json.dumps(shown["ranks"][0])
    dist.barrier()


def test_a_record_of_torch_is_kept_where_its_rank_ends_with_an_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('lockstep')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.all_reduce(torch.ones(1 + dist.get_rank()))\n"
    )
    records = tmp_path / "records"
    records.mkdir()
    environment = os.environ | {"LOCKSTEP_RECORD_DIR": str(records)}
    run = subprocess.run([COMMAND, "run", "-n", "2", "--", sys.executable, str(program)], env=environment, capture_output=True)
    assert run.returncode != 0
    for rank in 0, 1:
        record = json.loads((records / f"rank-{rank}.json").read_text())
        assert "all_reduce" in json.dumps(record["operations"]), record


def use_the_store():
    dist.init_process_group("lockstep", init_method="lockstep://", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"of {rank}", bytes(range(256)))
    store.wait([f"of {r}" for r in range(size)])
    assert store.get(f"of {size - 1 - rank}") == bytes(range(256))
    assert store.add("n", 1) in range(1, size + 1)
    dist.barrier()
    assert store.add("n", 0) == size and store.get("n") == str(size).encode()
    assert store.compare_set("chosen", "", f"by {rank}") == store.get("chosen")
    assert store.check(["n", "chosen"]) and not store.check(["n", "missing"])
    with raises(dist.DistStoreError, "timeout", "missing"):
        store.wait(["missing"], timedelta(milliseconds=20))
    with raises(Exception, "the store of `lockstep run` takes 128 KiB in a key and its value"):
        store.set("long", "x" * (1 << 18))
    with raises(Exception, "the value of", "is no number"):
        store.add("chosen", 1)
    for _ in range(3):
        store.append("appended", "x")
    store.set(f"is here {rank}", "")
    store.wait([f"is here {r}" for r in range(size)])
    assert store.get("appended") == b"xxx" * size
    assert not store.check(["appended"] + [f"missing {i}" for i in range(10_000)])
    assert store.check(["appended"] * 10_000)
    child = os.fork()
    if child == 0:
        try:
            store.add("n", 1)
        except Exception as error:
            os._exit(0 if "fork of a rank" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert store.add("n", 0) == size + 300 * size
    dist.barrier()
    if rank == 0:
        assert store.delete_key("n") and not store.delete_key("n")
    # Those of a second group are others.
    dist.destroy_process_group()
    dist.init_process_group("lockstep", init_method="lockstep://")
    assert not dist.distributed_c10d._get_default_store().check(["chosen"])
    # Rank 0 may end first.
    if rank == 0:
        os._exit(0)
    store = dist.distributed_c10d._get_default_store()
    store.set("after", "rank 0")
    assert store.get("after") == b"rank 0"


@pytest.mark.parametrize("launcher", [None, over_nodes(2, 1)], ids=["one node", "two nodes"])
def test_the_store_of_the_launcher(run_ranks, launcher):
    run_ranks(2, use_the_store, launcher=launcher, init=None, shares=False)


@on_ranks(2, init=None)
def test_the_limit_of_init_process_group_is_that_of_its_rendezvous():
    if os.environ["RANK"] == "1":
        return wait_for("gave-up")
    with raises(lockstep.TimeoutError, "rank 1"):
        dist.init_process_group("lockstep", init_method="lockstep://", timeout=timedelta(seconds=0.5))
    Path("gave-up").touch()


def test_a_call_of_the_store_names_the_rank_whose_end_ends_the_job(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('lockstep', init_method='lockstep://')\n"
        "if dist.get_rank() == 1: os._exit(3)\n"
        "dist.distributed_c10d._get_default_store().get('never')\n"
    )
    ended = subprocess.run([COMMAND, "run", "-n", "2", "--", sys.executable, program], capture_output=True, text=True)
    assert ended.returncode == 3
    assert "store" in ended.stderr and "`lockstep run` ends the job: rank 1 (pid " in ended.stderr


def test_the_default_group_over_two_nodes(run_ranks):
    """The layers, DistributedDataParallel, messages and groups of some ranks."""
    run_ranks(4, use_the_default_group, launcher=over_nodes(2, 2), init=None)


def use_the_default_group():
    dist.init_process_group("lockstep", init_method="lockstep://")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1000,), float(rank + 1))
    works = [dist.all_reduce(x, async_op=True)]
    works[0].wait()
    assert (x == size * (size + 1) / 2).all()
    everyone = [None] * size
    dist.all_gather_object(everyone, f"rank {rank}")
    assert everyone == [f"rank {r}" for r in range(size)]
    other = (rank + 2) % size  # on the other node
    if rank < other:
        dist.send(torch.tensor([rank]), other)
    else:
        received = torch.zeros(1, dtype=torch.int64)
        dist.recv(received, other)
        assert received.item() == other
    for members in [0, 1], [2, 3], [1, 2], [3, 0, 1]:
        group = dist.new_group(members)
        if rank in members:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(members)
    dist.monitored_barrier()
    dist.destroy_process_group()
