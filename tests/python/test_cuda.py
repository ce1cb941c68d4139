"""lockstep.nn on a device: ranks that share it equal one rank that has the whole batch. On the CPU too, everywhere."""

import contextlib
import copy
import itertools

import pytest
from ranks import OverRanks, compare_training

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.nn  # noqa: E402

# Against float64 on the same values. A 16-bit result is rounded once; what 16-bit activations leave in parameters
# and statistics is float32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
LAYOUTS = torch.contiguous_format, torch.channels_last


def start(backend):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def compare_layers(backend, device):
    rank, size = start(backend)
    device = torch.device(device)
    # torch's own layer, which lockstep's uses over NCCL, that has no two ranks on one GPU; Gloo has.
    ways = ["layer", "scope"] + ["torch's"] * (backend == "gloo" and device.type == "cuda")
    reaches_cuda = ls.nn._has_cuda_backend
    ls.nn._has_cuda_backend = lambda group: way == "torch's" or reaches_cuda(group)
    all_shares = [[2] * size, [5] + [2] * (size - 1), [2] * (size - 1) + [0]][: 1 if size == 1 else 3]
    ranks = OverRanks(rank, dist.all_reduce if size > 1 else lambda x: None)
    n = 0
    for dtype, layout, shares, way in itertools.product(TOLERANCES, LAYOUTS, all_shares, ways):
        state = torch.float64 if dtype is torch.float64 else torch.float32
        mine = nn.BatchNorm2d(5).to(device, state)
        # ATen's kernels round partial sums of gradients to the activations' type, other than in channels-last.
        of_state = 10 * TOLERANCES[state]
        ranks.compare(
            nn.BatchNorm2d(5).to(device, torch.float64), mine if way == "scope" else ls.nn.convert_sync_batchnorm(mine),
            shares, 5, 4, 3, dtype=dtype, layout=layout, tolerance=TOLERANCES[dtype], of_state=of_state,
            of_sums=max(of_state, 4 * TOLERANCES[dtype]), n_steps=1,
            scope=ls.nn.SyncBatchNormScope if way == "scope" else contextlib.nullcontext)  # fmt: skip
        n += 1
    if rank == 0:
        print(n, "right")
    dist.destroy_process_group()


def train(backend, device):
    """Steps of torch's DistributedDataParallel, with layers that were converted or in a scope."""
    _, size = start(backend)
    first = nn.Sequential(
        nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten(),
        nn.Tanh(),
    ).to(device, torch.float64)  # fmt: skip
    batches = [torch.randn(3 * size, 5, 8, 8, dtype=torch.float64).to(device) for _ in range(4)]

    def read(model):
        return model.module.state_dict()

    DDP = nn.parallel.DistributedDataParallel
    compare_training(copy.deepcopy(first), lambda net: DDP(ls.nn.convert_sync_batchnorm(net)), batches, read=read)
    compare_training(first, DDP, batches, scope=ls.nn.SyncBatchNormScope, read=read)
    dist.destroy_process_group()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_two_ranks_on_one_device(run_ranks, backend, device):
    n_ways = 3 if (backend, device) == ("gloo", "cuda") else 2
    run_ranks(2, compare_layers, backend=backend, device=device, init=None, says=f"{24 * n_ways} right")


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_train_on_one_device(run_ranks, device):
    backend = "lockstep" if device == "cpu" else "cpu:lockstep,cuda:gloo"
    run_ranks(2, train, backend=backend, device=device, init=None, returned=2)


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators that are called, with the devices of their tensors and other arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function.overloadpacket)
        if function.namespace != "prim":
            self.calls.append((name, *(str(getattr(arg, "device", arg)) for arg in args)))
        if "batch_norm" in name:  # this and add_ would need a device: native_batch_norm, or cuDNN's, which has a reserve
            return torch.empty_like(args[0]), *torch.empty(3 if "cudnn" in name else 2, 5, device="cuda")
        return args[0] if name == "aten.add_" else function(*args, **(kwargs or {}))


def forward_of_layer(bn, x):
    state = bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked
    return ls.nn._torch.sync_batch_norm(x, bn.num_features, *state, bn.momentum, bn.eps, None, "layer", "layer", False)


def forward_in_scope(bn, x):
    with ls.nn.SyncBatchNormScope():
        return bn(x)


@pytest.mark.parametrize("forward", [forward_of_layer, forward_in_scope])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_one_rank_runs_what_batch_norm_runs(forward, options):
    """Nothing goes to the host. On tensors without values, which need no device."""
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        for dtype in TOLERANCES:
            state = torch.float64 if dtype is torch.float64 else torch.float32
            bn = nn.BatchNorm2d(5, device="cuda", dtype=state, **options)
            if not bn.track_running_stats:
                bn.num_batches_tracked = None
            x = torch.empty(4, 5, 3, 3, device="cuda", dtype=dtype)
            with Recorder() as expected:
                bn(x)
            with Recorder() as got:
                forward(bn, x)
            assert sorted(got.calls) == sorted(expected.calls)
            assert any("batch_norm" in name for name, *_ in got.calls)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["nccl", "cpu:lockstep,cuda:nccl"])
def test_one_rank_over_nccl(run_ranks, backend):
    run_ranks(1, compare_layers, backend=backend, device="cuda", init=None, says="16 right")
    run_ranks(1, train, backend=backend, device="cuda", init=None, returned=1)
