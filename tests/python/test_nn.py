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
        f"from ranks import OverRanks, raises; torch.set_num_threads(1); torch.manual_seed(0); {WORLDS[world]}; "
        "compare = OverRanks(rank, sum_over_ranks).compare; converted = lambda plain: ls.nn.convert_sync_batchnorm(copy.deepcopy(plain))\n"
    )


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_those_of_one_rank(run_ranks, world):
    run_ranks(
        3,
        """
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
assert isinstance(layer, torch.nn.SyncBatchNorm)
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
        """
def compare_in_scope(plain, layer, run=None):
    def call(x):
        with ls.nn.SyncBatchNormScope():
            return (layer if run is None else run)(x)
    compare(plain, layer, [3, 2], 4, 5, 3, run=call)

class Functional(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)

for kind in nn.BatchNorm2d, Functional:
    plain = kind(4).double()
    if kind is Functional:
        plain.num_batches_tracked = None
    compare_in_scope(plain, copy.deepcopy(plain))
plain = nn.BatchNorm2d(4).double()
layer = copy.deepcopy(plain)
compare_in_scope(plain, layer, torch.jit.script(layer))
plain = nn.BatchNorm2d(4).double()
layer = copy.deepcopy(plain)
compiled = torch.compile(layer, backend="eager")
compiled(torch.randn(2, 4, 5, 3).double())  # so that there is something compiled
layer.load_state_dict(plain.state_dict())
compare_in_scope(plain, layer, compiled)
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
        """
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
with raises(ls.UsageError, "this rank is not in the process group"):
    ls.nn.SyncBatchNorm(3, process_group=halves[1 - rank // 2])(torch.ones(2, 3))
""",
        prelude=prelude("lockstep"),
    )


@pytest.mark.parametrize("made", ["a = layer(); b = layer()", "a, b = layer(), layer()"], ids=["two lines", "one line"])
@pytest.mark.parametrize("world", WORLDS)
def test_layers_in_another_order_on_one_rank(run_ranks, world, made):
    """In forward, and in backward: gradients of two losses that one rank takes in another order."""
    made = made.replace("; ", "\n").replace("layer()", "ls.nn.SyncBatchNorm(3)")
    run_ranks(
        2,
        made
        + """
x, z = (torch.rand(2, 3, requires_grad=True) for _ in range(2))
losses = [a(x).sum(), b(z).sum()]
with raises(ls.MismatchError, "layer", "of the line that made it" if IS_OURS else "different layers"):
    for loss in losses if rank == 0 else reversed(losses):
        loss.backward()
""".replace("IS_OURS", str(world != "gloo")),
        prelude=prelude(world),
    )
    said = run_ranks(
        2,
        made
        + """
try:
    for layer in (a, b) if rank == 0 else (b, a):
        layer(torch.rand(2, 3))
except ls.MismatchError as error:
    print("refused:", str(error).count(", layer ") + str(error).count(": layer "))
""",
        prelude=prelude(world),
    )
    assert said.count("refused: 2") == 2, said


def test_calls_of_layers_and_of_the_program_keep_its_order(run_ranks):
    run_ranks(
        2,
        """
layer = ls.nn.SyncBatchNorm(3, momentum=1.0)
x = torch.full((1 << 20,), float(rank))
works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
layer(torch.full((2, 3), float(rank)))
assert torch.equal(layer.running_mean, torch.full((3,), 0.5))
for work in works:
    work.wait()
assert x.eq(4).all()
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
plain = nn.BatchNorm1d(3, track_running_stats=False)
with ls.nn.SyncBatchNormScope():
    synchronised = plain(x)
    plain.eval()
    if rank == 0:
        assert torch.allclose(layer(x), expected)
        assert torch.allclose(plain(x), expected)
        with raises(ValueError, "Expected more than 1 value per channel"):
            plain(x[:1])
    ls.barrier()
    plain.train()
    assert torch.equal(plain(x), synchronised) and not torch.allclose(synchronised, expected)
""",
        prelude=prelude("no torch.distributed"),
    )


def test_errors_name_the_layer_and_the_line(run_ranks):
    run_ranks(
        2,
        """
model = ls.nn.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))))
with raises(ls.UsageError, "Expected more than 1 value per channel", "program.py:4"):
    model(torch.randn(1 - rank, 3))
of_layer = "forward of SyncBatchNorm '1.0'" if rank == 0 else ""
with raises(ls.MismatchError, "program.py:8", "program.py:10", of_layer):
    if rank == 0:
        model(torch.randn(2, 3))
    else:
        ls.barrier()
""",
        prelude=prelude("no torch.distributed"),
    )


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_of_gradients(run_ranks, world):
    """Of what the ranks compute together, as a function of the whole batch, which each of them has."""
    run_ranks(
        2,
        """
class Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient)

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.contiguous().clone()
        sum_over_ranks(total)
        return total
    @staticmethod
    def backward(ctx, gradient):
        return Replicate.apply(gradient)

def whole(layer, own):
    def f(x, weight, bias):
        y = torch.func.functional_call(layer, {"weight": Replicate.apply(weight), "bias": Replicate.apply(bias)}, Replicate.apply(x)[own])
        return Sum.apply(torch.zeros_like(x).index_put((torch.tensor(own),), y))
    return f

torch.manual_seed(0)
for plain, shape in (nn.BatchNorm1d(2), ()), (nn.BatchNorm2d(2, affine=True), (2, 2)):
    x = torch.randn(5, 2, *shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    f = whole(converted(plain.double()), [0, 1, 2] if rank == 0 else [3, 4])
    assert torch.autograd.gradcheck(f, (x, weight, bias))
    assert torch.autograd.gradgradcheck(f, (x, weight, bias))
""",
        prelude=prelude(world),
    )
