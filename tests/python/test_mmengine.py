"""lockstep.mmengine does what mmengine.dist does: the names, parameters and results of both are compared."""

import inspect
import os
import subprocess
import sys
from collections import OrderedDict, UserDict, deque
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from ranks import join, on_ranks, on_worlds, raises

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("mmengine.dist")

import torch.distributed as dist  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.mmengine as ours  # noqa: E402

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.float16]


def parameters_of(function):
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_names_and_signatures():
    assert set(ours.__all__) == set(theirs.__all__)
    for name in theirs.__all__:
        assert parameters_of(getattr(ours, name)) == parameters_of(getattr(theirs, name)), name
        assert getattr(ours, name).__doc__, name


def after(function, data, *arguments, **options):
    """What a function leaves in data, and returns."""
    return function(data, *arguments, **options), data


def calls(rank):
    """What both are called with, as (name, function of the module)."""

    def tensor(dtype=torch.int64):
        return (torch.arange(6).reshape(2, 3) * 3 + 7 * rank + 1).to(dtype)

    def several(dtype=torch.int64):
        return [tensor(dtype), tensor(dtype)[:, 0].contiguous(), torch.full((), rank + 2, dtype=dtype)]

    def each(name, *variants):
        for variant in variants:
            yield name, variant

    for dtype in DTYPES:
        for op in "sum", "mean", "product", "min", "max", "SUM":
            yield from each(
                f"all_reduce {dtype} {op}",
                lambda d, t=dtype, op=op: after(d.all_reduce, tensor(t), op),
                lambda d, t=dtype, op=op: after(d.all_reduce_dict, {"b": tensor(t), "a": tensor(t)[0]}, op),
                lambda d, t=dtype, op=op: after(d.all_reduce_params, several(t), op=op),
                lambda d, t=dtype, op=op: after(d.all_reduce_params, several(t), bucket_size_mb=1, op=op),
                lambda d, t=dtype, op=op: after(d.all_reduce_params, several(t), False, -1, op),
            )
    for op in "band", "bor", "bxor":
        yield op, lambda d, op=op: after(d.all_reduce, data=tensor(), op=op)
    yield from each(
        "all_reduce",
        lambda d: after(d.all_reduce, tensor()),
        lambda d: after(d.all_reduce, torch.tensor(rank + 1.5)),
        lambda d: after(d.all_reduce, torch.zeros(0)),
        lambda d: after(d.all_reduce_dict, {"int": torch.tensor([rank]), "float": torch.tensor([0.5, 1.5])}),
        lambda d: d.all_reduce_params(each for each in several()),
    )
    if ours.get_world_size() > 1:  # alone, neither looks at op
        yield "unknown op", lambda d: d.all_reduce(tensor(), "average")
    yield from each(
        "gather",
        lambda d: d.all_gather(tensor()),
        lambda d: d.all_gather(data=torch.tensor(rank + 0.5), group=None),
        lambda d: d.all_gather(torch.zeros(0, 3)),
        lambda d: d.gather(tensor(torch.float32)),
        lambda d: d.gather(tensor(), dst=d.get_world_size() - 1),
        lambda d: after(d.broadcast, tensor()),
        lambda d: after(d.broadcast, tensor(torch.float64), d.get_world_size() - 1),
        lambda d: after(d.broadcast, tensor().t() if rank else tensor().t().contiguous(), 0),
    )
    objects = [rank, "x" * (rank * 1000), {1: [None, 2.5]}, np.arange(rank + 2)]
    yield from each(
        "objects",
        lambda d: d.all_gather_object(objects),
        lambda d: d.gather_object(objects),
        lambda d: d.gather_object(data=objects, dst=d.get_world_size() - 1),
        lambda d: after(d.broadcast_object_list, list(objects)),
        lambda d: after(d.broadcast_object_list, data=[rank, rank], src=d.get_world_size() - 1),
        lambda d: after(d.broadcast_object_list, [[]]),
        lambda d: d.broadcast_object_list("foo"),
        lambda d: d.broadcast_object_list((1, 2)),
        lambda d: d.all_reduce_dict("foo"),
        lambda d: d.all_reduce_dict([("a", tensor())]),
    )
    part = [(rank, i) for i in range(3 - rank)]
    yield from each(
        "collect_results",
        lambda d: d.collect_results(part, 5),
        lambda d: d.collect_results(part, 2),
        lambda d: d.collect_results(part, 5, "gpu"),
        lambda d: d.collect_results(part, 5, device="npu"),
        lambda d: d.collect_results(part, 5, "cpu", f"results-of-{d.__name__}"),
        lambda d: d.collect_results(results=[None, rank], size=9),
        lambda d: d.collect_results_cpu(part, 5),
        lambda d: d.collect_results_cpu(result_part=part, size=4, tmpdir=f"a/{d.__name__}"),
        lambda d: d.collect_results_gpu(part, 5),
        lambda d: d.collect_results([], 0),
        lambda d: d.collect_results(part, 5, "tpu"),
        lambda d: d.collect_results(part, 5, "gpu", "folder"),
    )
    yield from each(
        "the world",
        lambda d: (d.get_rank(), d.get_world_size(), d.get_dist_info(), d.get_backend(), d.is_distributed()),
        lambda d: (d.is_main_process(), d.master_only(lambda x, y: x - y)(5, y=2), d.get_comm_device(), d.barrier()),
        lambda d: d.get_default_group() is dist.group.WORLD,
        lambda d: d.get_local_group(),
        lambda d: (d.get_local_rank(), d.get_local_size()),
        lambda d: (np.random.seed(3 + rank), d.sync_random_seed(), np.random.randint(1000)),
        lambda d: d.init_dist("nothing"),
        lambda d: d.init_dist("pytorch", timeout="soon"),
    )
    yield from each(
        "data_device",
        lambda d: d.get_data_device(tensor()),
        lambda d: d.get_data_device([tensor(), {"x": (tensor(), {tensor()})}, UserDict(y=deque([tensor()]))]),
        lambda d: d.get_data_device([tensor(), 1]),
        lambda d: d.get_data_device({"x": "123"}),
        lambda d: d.get_data_device([]),
        lambda d: d.get_data_device({}),
        lambda d: d.get_data_device([tensor(), torch.zeros(1, device="meta")]),
        lambda d: d.get_data_device("123"),
        lambda d: d.get_data_device(np.zeros(2)),
        lambda d: d.cast_data_device(tensor(), CPU),
        lambda d: d.cast_data_device(OrderedDict(x=[tensor(), (tensor(),)], y=deque([tensor()])), torch.device("meta")),
        lambda d: after(lambda out: d.cast_data_device(tensor(), CPU, out), torch.zeros(2, 3)),
        lambda d: after(lambda out: d.cast_data_device({"x": [tensor()]}, CPU, out=out), {"x": [torch.zeros(2, 3)]}),
        lambda d: d.cast_data_device([], CPU),
        lambda d: d.cast_data_device({}, CPU),
        lambda d: d.cast_data_device(1, CPU),
        lambda d: d.cast_data_device("123", CPU),
        lambda d: d.cast_data_device(np.zeros(2), CPU),
        lambda d: d.cast_data_device(tensor(), CPU, "123"),
        lambda d: d.cast_data_device({0, 1}, CPU, {2, 3}),
        lambda d: d.cast_data_device({"x": tensor(), "y": tensor()}, CPU, {"x": tensor()}),
    )


def outcome_of(call, module):
    try:
        return call(module)
    except Exception as error:
        return error


def same(mine, other):
    """Whether what lockstep's function has done is what mmengine's has."""
    if isinstance(other, Exception):
        return isinstance(mine, type(other)) and len(str(mine)) > 20
    if isinstance(other, torch.Tensor):
        return mine.dtype == other.dtype and mine.device == other.device and mine.shape == other.shape and (
            mine.is_meta or torch.equal(mine, other)
        )
    if isinstance(other, np.ndarray):
        return np.array_equal(mine, other)
    if isinstance(other, (dict, UserDict)):
        return type(mine) is type(other) and list(mine) == list(other) and all(same(mine[key], other[key]) for key in other)
    if isinstance(other, (list, tuple, deque)):
        return isinstance(mine, type(other)) and len(mine) == len(other) and all(map(same, mine, other))
    return type(mine) is type(other) and mine == other


def compare(rank):
    n_compared = 0
    for name, call in calls(rank):
        other, mine = outcome_of(call, theirs), outcome_of(call, ours)
        place = f"{name}, line {call.__code__.co_firstlineno}"
        assert same(mine, other), f"{place}: {mine!r} is not {other!r}"
        if isinstance(other, Exception):
            assert isinstance(mine, ls.UsageError), f"{place}: {mine!r}"
        n_compared += 1
    assert n_compared > 200


def test_results_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compare(0)
    data = torch.arange(3)
    assert ours.all_gather(data)[0] is data and ours.gather(data)[0] is data
    with raises(ls.UsageError, "call init_dist before"):
        ours.get_default_group()


@on_worlds(2, worlds=["gloo", "lockstep"])
def test_results_over_ranks(world):
    compare(join(world).rank)
    assert not Path("results-of-lockstep.mmengine").exists() and Path("a").is_dir() and not list(Path("a").iterdir())
    assert ours.get_backend() == world


@on_worlds(2, worlds=["gloo", "lockstep"], shares=False)  # mmengine keeps its group in the next world
def test_local_groups(world):
    rank = join(world).rank
    with raises(RuntimeError, "call init_local_group"):
        ours.get_local_group()
    for bad in -1, 1:
        with raises(ValueError, f"node_rank is {bad}", "1 hosts of 2"):
            ours.init_local_group(bad, 2)
    ours.init_local_group(rank, 1)
    assert (ours.get_local_rank(), ours.get_local_size()) == (0, 1)
    assert ours.get_backend(ours.get_local_group()) == world
    with raises(AssertionError, "use get_local_group()"):
        ours.init_local_group(rank, 1)
    theirs.init_local_group(0, 2)  # its own
    assert (theirs.get_local_rank(), theirs.get_local_size()) == (rank, 2)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/again", rank=rank, world_size=2)
    ours.init_local_group(0, 2)
    assert (ours.get_local_rank(), ours.get_local_size()) == (rank, 2)


@on_worlds(3, worlds=["gloo", "lockstep"])
def test_in_a_group_ranks_are_those_of_the_world(world):
    """mmengine takes src for a rank of the world, and dst for one of the group as well."""
    rank = join(world).rank
    group = dist.new_group([1, 2])
    x = torch.tensor([rank])
    if rank == 0:
        assert ours.get_rank(group) == -1
        with raises(ls.UsageError, "all_reduce: this rank is not in the group"):
            ours.all_reduce(x, group=group)
        dist.barrier()  # its store serves the others
        return
    ours.all_reduce(x, "mean", group=group)
    assert x.item() == 1 and ours.get_dist_info(group) == (rank - 1, 2)
    for other in 1, 2:
        is_other = rank == other
        assert ours.gather(torch.tensor([rank]), other, group) == ([1, 2] if is_other else [])
        assert ours.gather_object(rank, other, group) == ([1, 2] if is_other else None)
        x, objects = torch.tensor([rank]), [rank]
        ours.broadcast(x, other, group), ours.broadcast_object_list(objects, other, group)
        assert x.item() == other and objects == [other]
    seeds = ours.all_gather_object(ours.sync_random_seed(group), group)
    assert seeds[0] == seeds[1]
    dist.barrier()


@on_worlds(2, worlds=["gloo", "lockstep"])
def test_what_mmengine_does_not_take(world):
    rank = join(world).rank
    columns = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
    ours.all_reduce(columns)
    assert torch.equal(columns, torch.arange(6.0).reshape(2, 3).t() * 3)
    assert torch.equal(ours.all_gather(columns)[1], columns)
    parameter = torch.nn.Parameter(torch.full((2,), rank + 1.0))
    version = parameter._version
    ours.all_reduce(parameter, "mean")
    assert parameter.tolist() == [1.5, 1.5] and parameter._version > version
    ours.all_reduce_params([parameter, parameter], coalesce=False)  # once
    assert parameter.tolist() == [3, 3]
    ours.broadcast(parameter, 1)
    conjugate = torch.tensor([1 + 2j * rank]).conj()
    ours.all_reduce(conjugate)
    assert conjugate.tolist() == [2 - 2j]
    assert not [x for x in ours.all_gather(parameter) if x.requires_grad]
    for call, text in [
        (lambda: ours.all_reduce([1.0]), "all_reduce: data is list; it must be a tensor"),
        (lambda: ours.all_gather(), "all_gather: missing a required argument: 'data'"),  # type: ignore[call-arg]
        (lambda: ours.all_reduce_dict({"a": 1}), "all_reduce_dict: data['a'] is int; it must be a tensor"),
        (lambda: ours.all_reduce_params([1]), "params holds int at 0"),
        (lambda: ours.all_reduce_params(parameter), "params is Parameter"),
    ]:
        with raises(TypeError, text):
            call()
    if rank == 0:
        Path("mine").mkdir()
        Path("mine/notes").write_text("kept")
    ours.barrier()
    assert ours.collect_results([rank], 2, tmpdir="mine") == ([0, 1] if rank == 0 else None)
    ours.barrier()
    assert [each.name for each in Path("mine").iterdir()] == ["notes"]
    # As over a backend that sends from GPUs, to which results are not copied.
    assert ours._gathered_by_files([rank], None) == ([[0], [1]] if rank == 0 else None)
    ours.barrier()
    assert not list(Path().glob(".collect_results-*"))
    with raises(FileNotFoundError, "no file of ranks [1]: give a tmpdir that all ranks share") if rank == 0 else nullcontext():
        ours.collect_results([0], 1, tmpdir=f"of-rank-{rank}")  # on another file system
    assert {file.stat().st_mode & 0o777 for file in Path(f"of-rank-{rank}").iterdir()} == {0o600}
    dicts = [{"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2), "c": torch.ones(1)}]
    with raises(ValueError, "only rank 0 of the group has 'b' of shape [1], only rank 1 'c' of shape [1]"):
        ours.all_reduce_dict(dicts[rank])


def test_init_dist_without_gpus():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with raises(ls.UsageError, "this process has no GPU: pass backend='gloo' or backend='lockstep'"):
        ours.init_dist("pytorch")
    with raises(ValueError, "init_backend is 'horovod'; it must be torch, deepspeed or colossalai"):
        ours.init_dist("pytorch", "gloo", "horovod")


def init_and_compare(launcher, backend, variables=None, port=None):
    os.environ.update(variables or {})
    assert ours.infer_launcher() == launcher, ours.infer_launcher()
    options = {} if port is None else {"port": port}
    ours.init_dist(launcher, backend=backend, timeout=60, **options)
    assert ours.get_backend() == backend and ours.get_world_size() == 2
    x = torch.tensor([ours.get_rank() + 1])
    ours.all_reduce(x)
    assert x.item() == 3
    assert torch.multiprocessing.get_start_method() == "spawn"
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
@on_ranks(2, init=None, shares=False)
def test_init_dist(backend):
    """`lockstep run` sets what torchrun does."""
    init_and_compare("pytorch", backend)


@pytest.mark.parametrize("kind", ["slurm", "mpi"])
@on_ranks(2, init=None, shares=False)
def test_init_dist_by_the_variables_of(kind):
    own = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with raises(ls.UsageError, f"launcher is '{kind}', and the environment lacks", "infer_launcher() says 'none'"):
        ours.init_dist(kind, "gloo")
    sources = ours._LAUNCHERS[kind]
    init_and_compare(kind, "gloo", {sources[name]: value for name, value in own.items()})


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_init_dist_under_mpirun(run_ranks, mpirun, backend):
    """Nobody says where the ranks find each other."""
    run_ranks(2, init_under_mpirun, launcher=mpirun, init=None, backend=backend, returned=2)


def init_under_mpirun(backend):
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        init_and_compare("mpi", backend)
    else:  # mmengine knows no other MPI
        assert ours.infer_launcher() == theirs.infer_launcher() == "none"
        ours.init_dist("mpi", backend)
        assert ours.get_world_size() == 2


def test_launchers_are_inferred_as_by_mmengine(monkeypatch):
    for name in "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_LOCAL_RANK":
        monkeypatch.delenv(name, raising=False)
    for name in "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_NTASKS", "WORLD_SIZE":
        assert ours.infer_launcher() == theirs.infer_launcher()
        monkeypatch.setenv(name, "2")
    assert ours.infer_launcher() == theirs.infer_launcher() == "pytorch"


PROGRAM = """
import sys
import lockstep.mmengine
for name in "mmengine.dist", "mmengine.dist.dist", "mmengine.dist.utils":
    sys.modules[name] = lockstep.mmengine

import mmengine.dist as dist
from mmengine.dist.utils import master_only
from mmengine.evaluator import BaseMetric
assert dist.all_reduce is lockstep.mmengine.all_reduce and master_only is lockstep.mmengine.master_only

class Mean(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {"mean": sum(results) / len(results), "n": len(results)}

if len(sys.argv) < 2:
    dist.init_dist("pytorch", backend="lockstep")
metric = Mean()
metric.process(None, [2.0 * dist.get_rank() + 1, 1.0])
assert metric.evaluate(2 * dist.get_world_size()) == {"mean": 1.5, "n": 4} if dist.get_world_size() == 2 else {"mean": 1, "n": 2}
"""


def test_mmengine_itself_runs_over_it(run_ranks, tmp_path):
    run_ranks(2, PROGRAM)
    subprocess.run([sys.executable, tmp_path / "program.py", "alone"], check=True, timeout=240, cwd=tmp_path)
