"""How the ranks of torch.distributed start, and where."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMMAND, in_a_file

pytest.importorskip("torch")


def test_torchrun(run_torch, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    run_torch(
        2,
        """
        x = torch.ones(2)
        dist.all_reduce(x)
        assert (x == 2).all()
        dist.destroy_process_group()
        dist.init_process_group("lockstep")
        dist.all_reduce(x)
        assert (x == 4).all()
        """,
        launcher=torchrun,
    )


def test_spawn(tmp_path):
    program = Path(tmp_path) / "program.py"
    program.write_text("""
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, name):
    dist.init_process_group("lockstep", init_method=f"file://{name}", rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
    dist.destroy_process_group()
if __name__ == "__main__":
    for method in "spawn", "fork":
        mp.start_processes(main, args=(sys.argv[1] + method,), nprocs=2, start_method=method)
""")
    done = subprocess.run(
        [sys.executable, program, tmp_path / "store"], stderr=subprocess.PIPE, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


# To a file each, because in a launcher's own output the ranks' lines may break in the middle.
SUM_OF_TWO = """
import os, torch, torch.distributed as dist
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
with open(f"{os.getpid()}.said", "w") as file: file.write(f"{x.item()} {dist.get_world_size()}")
dist.destroy_process_group()
"""


def test_mpirun(run_ranks, tmp_path, mpirun):
    run_ranks(2, SUM_OF_TWO, launcher=mpirun, prelude="")
    assert [path.read_text() for path in tmp_path.glob("*.said")] == ["2.0 2"] * 2


def test_srun(run_ranks, tmp_path):
    script = Path(__file__).parent.parent / "cli" / "slurm_cluster.sh"
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("srun", "slurmctld", "munged")):
        pytest.skip("no root, or no Slurm")
    folder = tmp_path / "slurm"
    cluster = subprocess.Popen(["bash", script, folder], stdout=subprocess.PIPE, text=True)
    try:
        assert cluster.stdout.readline() == "ready\n"
        env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        run_ranks(2, SUM_OF_TWO, launcher=["srun", "-n", "2"], env=env, prelude="")
        assert [path.read_text() for path in tmp_path.glob("*.said")] == ["2.0 2"] * 2
    finally:
        cluster.terminate()
        cluster.wait()


def test_alone(run_ranks, tmp_path):
    run_ranks(1, SUM_OF_TWO, launcher=["env"], prelude="")
    assert [path.read_text() for path in tmp_path.glob("*.said")] == ["1.0 1"]


def test_without_a_launcher_torch_says_what_it_misses(run_ranks):
    run_ranks(
        1,
        """
        import torch.distributed as dist
        from ranks import raises
        with raises(ValueError, "RANK expected"):
            dist.init_process_group("lockstep")
        """,
        launcher=["env"],
        prelude="",
    )


def test_beside_a_backend_that_this_torch_lacks(run_torch):
    run_torch(
        2,
        f"""
        dist.destroy_process_group()
        if dist.is_nccl_available():
            sys.exit(0)
        try:
            dist.init_process_group("cpu:lockstep,cuda:nccl", {in_a_file()})
            raise AssertionError
        except RuntimeError as error:
            assert "NCCL" in str(error), error
        """,
    )


def test_hosts(run_torch, tmp_path):
    """Ranks in PID namespaces of their own share no memory, as on another host: Gloo between them."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    run_torch(
        3,
        """
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
        """,
        launcher=[COMMAND, "run", "-n", "3", "--", "sh", "-c",
                  '[ "$RANK" != 2 ] || exec unshare --pid --fork --kill-child "$@"; exec "$@"', "sh"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


def test_a_rank_may_end_while_it_connects_to_a_store_that_is_gone():
    """As a survivor that has no other rank to wait for; its store's answer is that the connection ends."""
    program = """
import sys
from datetime import timedelta
from lockstep import _backend
_backend._CONNECT_TIME = timedelta(seconds=0.5)
store, why = _backend._connect("127.0.0.1", int(sys.argv[1]), 2)
assert store is None and why == "no answer", (store, why)
print("ends", flush=True)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", program, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
            accepted, _ = server.accept()
            assert rank.stdout.readline() == "ends\n"
            accepted.close()
            server.close()
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors


def test_groups_of_the_same_number_after_another_init(run_ranks):
    """The store outlives the world: a rank that was not in the earlier group of that number is in the next."""
    run_ranks(
        3,
        """
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, int(os.environ["RANK"]) == 0)
        for members in [0, 1], [1, 2], [0, 1, 2]:
            dist.init_process_group("lockstep", store=store, rank=int(os.environ["RANK"]), world_size=3)
            group = dist.new_group(members)
            if dist.get_rank() in members:
                x = torch.ones(1)
                dist.all_reduce(x, group=group)
                assert x.item() == len(members)
            dist.barrier()
            dist.destroy_process_group()
        # Rank 0's store ends last.
        store.add("ended", 1)
        while int(os.environ["RANK"]) == 0 and store.add("ended", 0) < 3: time.sleep(0.01)
        """,
        prelude="import os, time, torch, torch.distributed as dist\n",
    )
