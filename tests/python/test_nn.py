"""lockstep.nn over several ranks: each compares itself with one rank that has the whole batch."""

import pytest

pytest.importorskip("torch")

WORLDS = {
    "no torch.distributed": "ls.init_dist(timeout=60); rank, size = ls.get_dist_info(); sum_over_ranks = ls.all_reduce",
    **{
        backend: (
            f"dist.init_process_group('{backend}'); rank, size = dist.get_rank(), dist.get_world_size(); "
            # Without it torch may end a process with std::terminate.
            "sum_over_ranks = dist.all_reduce; import atexit; atexit.register(dist.destroy_process_group)"
        )
        for backend in ["gloo", "lockstep"]
    },
}


def prelude(world):
    return (
        "import copy, sys, torch, torch.distributed as dist, lockstep as ls, lockstep.nn; from torch import nn; "
        f"torch.set_num_threads(1); torch.manual_seed(0); {WORLDS[world]}\n"
    )


COMPARE = """
def close(actual, expected, tolerance, what):
    if expected is None or expected.dtype is torch.int64:
        assert (actual is None) if expected is None else torch.equal(actual, expected), what
        return
    assert actual.dtype == expected.dtype, (what, actual.dtype)
    error = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0
    assert error <= tolerance * max(1, expected.double().abs().max().item() if expected.numel() else 1), (what, error)

class Layer:
    def __init__(self, state, run=None):
        self.state, self.run = state, state if run is None else run
    def __call__(self, input):
        return self.run(input)

def compare(plain, run, counts, *shape, dtype=torch.float64, layout=torch.contiguous_format, tolerance=1e-9):
    # plain: the reference. run: the same over the ranks, a Layer.
    for step in range(2):
        whole = (torch.randn(sum(counts), *shape, dtype=torch.float64) * 3 + 7).to(dtype).requires_grad_()
        expected = plain(whole)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        mine = whole.detach().split(counts)[rank].contiguous(memory_format=layout).requires_grad_()
        actual = run(mine)
        assert actual.is_contiguous(memory_format=layout), "output"
        actual.backward(gradient.split(counts)[rank])
        assert mine.grad.is_contiguous(memory_format=layout), "gradient"
        close(actual, expected.split(counts)[rank], tolerance, "output")
        close(mine.grad, whole.grad.split(counts)[rank], tolerance, "gradient")
    for name, parameter in run.state.named_parameters():
        total = parameter.grad.clone()
        sum_over_ranks(total)
        close(total, plain.get_parameter(name).grad, tolerance, name)
    assert run.state.state_dict().keys() == plain.state_dict().keys()
    for name, buffer in run.state.named_buffers():
        close(buffer, plain.get_buffer(name), tolerance, name)

def converted(plain):
    layer = ls.nn.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(layer, torch.nn.SyncBatchNorm)
    return Layer(layer)
"""


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_those_of_one_rank(run_ranks, world):
    run_ranks(
        3,
        COMPARE
        + """
equal, uneven, few = [4, 4, 4], [5, 0, 2], [1, 0, 1]
for kind, shape in [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (9,)), (nn.BatchNorm2d, (5, 3)),
                    (nn.BatchNorm2d, (17, 16)), (nn.BatchNorm3d, (2, 3, 4))]:
    for counts in equal, uneven, few:
        plain = kind(4).double()
        compare(plain, converted(plain), counts, 4, *shape)
for options in [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.7}]:
    plain = nn.BatchNorm2d(4, **options, dtype=torch.float64)
    compare(plain, converted(plain), uneven, 4, 5, 3)
for counts in equal, uneven:
    plain = nn.BatchNorm2d(4).double()
    compare(plain, converted(plain), counts, 4, 5, 3, layout=torch.channels_last)
    plain = nn.BatchNorm2d(4)
    compare(plain, converted(plain), counts, 4, 5, 3, tolerance=1e-5, dtype=torch.float32)
    for dtype in torch.bfloat16, torch.float16:
        plain = nn.BatchNorm2d(4)
        compare(plain, converted(plain), counts, 4, 5, 3, tolerance=3e-2, dtype=dtype)

layer = converted(nn.BatchNorm2d(4).double())
layer = layer.state
with torch.no_grad():  # collective all the same
    layer(torch.full((1, 4, 1, 1), float(rank), dtype=torch.float64))
assert torch.allclose(layer.running_mean, torch.full((4,), 0.1, dtype=torch.float64))
layer.eval()
if rank == 0:
    layer(torch.zeros(1, 4, 1, 1, dtype=torch.float64))  # not collective
""",
        prelude=prelude(world),
    )


@pytest.mark.parametrize("world", WORLDS)
def test_scope(run_ranks, world):
    run_ranks(
        2,
        COMPARE
        + """
class InScope(Layer):
    def __call__(self, input):
        with ls.nn.SyncBatchNormScope():
            return self.run(input)

class Functional(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)

for kind in nn.BatchNorm2d, Functional:
    plain = kind(4).double()
    if kind is Functional:
        plain.num_batches_tracked = None
    compare(plain, InScope(copy.deepcopy(plain)), [3, 2], 4, 5, 3)
plain = nn.BatchNorm2d(4).double()
layer = copy.deepcopy(plain)
compare(plain, InScope(layer, torch.jit.script(layer)), [3, 2], 4, 5, 3)
plain = nn.BatchNorm2d(4).double()
layer = copy.deepcopy(plain)
compiled = torch.compile(layer, backend="eager")
compiled(torch.randn(2, 4, 5, 3).double())  # so that there is something compiled
layer.load_state_dict(plain.state_dict())
compare(plain, InScope(layer, compiled), [3, 2], 4, 5, 3)
layer(torch.randn(2, 4, 5, 3).double() * (rank + 1))  # outside: on its own
total = layer.running_mean.clone()
sum_over_ranks(total)
assert not torch.allclose(total, size * layer.running_mean)
""",
        prelude=prelude(world),
    )


def test_groups(run_ranks):
    run_ranks(
        4,
        COMPARE
        + """
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
layer = ls.nn.SyncBatchNorm(3, process_group=halves[rank // 2], momentum=1.0, dtype=torch.float64)
layer(torch.full((2, 3), float(rank), dtype=torch.float64))
assert torch.allclose(layer.running_mean, torch.full((3,), rank // 2 * 2 + 0.5, dtype=torch.float64)), layer.running_mean
model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
model = ls.nn.SyncBatchNorm.convert_sync_batchnorm(model, halves[rank // 2])
assert model[1].process_group is halves[rank // 2]
with ls.nn.SyncBatchNormScope(halves[rank // 2]):
    plain = nn.BatchNorm1d(3, momentum=1.0).double()
    plain(torch.full((2, 3), float(rank), dtype=torch.float64))
assert torch.allclose(plain.running_mean, layer.running_mean)
try:
    ls.nn.SyncBatchNorm(3, process_group=halves[1 - rank // 2])(torch.ones(2, 3))
    raise AssertionError
except ls.UsageError as error:
    assert "this rank is not in the process group" in str(error), error
""",
        prelude=prelude("lockstep"),
    )


def test_groups_of_lockstep(run_ranks):
    run_ranks(
        2,
        """
alone = ls.default_group().split(rank)
layer = ls.nn.SyncBatchNorm(3, process_group=alone, momentum=1.0)
layer(torch.full((2, 3), float(rank)))
assert torch.equal(layer.running_mean, torch.full((3,), float(rank)))
with ls.nn.SyncBatchNormScope(alone):
    plain = nn.BatchNorm1d(3, momentum=1.0)
    plain(torch.full((2, 3), float(rank)))
assert torch.equal(plain.running_mean, layer.running_mean)
""",
        prelude=prelude("no torch.distributed"),
    )


def test_eval_without_running_statistics_is_of_one_rank(run_ranks):
    run_ranks(
        2,
        """
layer = ls.nn.convert_sync_batchnorm(nn.BatchNorm1d(3, track_running_stats=False)).eval()
x = torch.randn(4, 3) * (rank + 1)
expected = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True)
with ls.nn.SyncBatchNormScope():
    if rank == 0:
        assert torch.allclose(layer(x), expected)
    ls.barrier()
""",
        prelude=prelude("no torch.distributed"),
    )


def test_errors_name_the_layer_and_the_line(run_ranks):
    run_ranks(
        2,
        """
model = ls.nn.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))))
try:
    model(torch.randn(1 - rank, 3))
    raise AssertionError
except ls.UsageError as error:
    assert "Expected more than 1 value per channel" in str(error) and "program.py:4" in str(error), error
try:
    if rank == 0:
        model(torch.randn(2, 3))
    else:
        ls.barrier()
    raise AssertionError
except ls.MismatchError as error:
    assert "program.py:10" in str(error) and "program.py:12" in str(error), error
    assert rank == 1 or "forward of SyncBatchNorm '1.0'" in str(error), error
""",
        prelude=prelude("no torch.distributed"),
    )
