"""lockstep.nn on a device: ranks that share it equal one rank that has the whole batch. On the CPU too, everywhere."""

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
import contextlib, copy, itertools, torch, torch.distributed as dist, lockstep as ls, lockstep.nn
from torch import nn
torch.set_num_threads(1)
dist.init_process_group({backend!r})
rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device({device!r})
# torch's own layer, which lockstep's uses over NCCL, that has no two ranks on one GPU; Gloo has.
WAYS = ["layer", "scope"] + ["torch's"] * ({backend!r} == "gloo" and device.type == "cuda")
reaches_cuda = ls.nn._reaches_cuda
ls.nn._reaches_cuda = lambda group: way == "torch's" or reaches_cuda(group)

def total(x):
    x = x.cpu()
    if size > 1:
        dist.all_reduce(x)
    return x

def close(got, expected, dtype, tolerance, what):
    assert got.device.type in ("cpu", device.type), what
    assert got.dtype == dtype, (what, got.dtype)
    error = (got.double().cpu() - expected.cpu()).abs().max().item() if got.numel() else 0
    assert error <= tolerance, (what, error)

# Against float64 on the same values, which are about 1. A 16-bit result is rounded once; what 16-bit activations
# leave in parameters and statistics is float32.
TOLERANCES = {{torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}}
SHARES = [[2] * size, [5] + [2] * (size - 1), [2] * (size - 1) + [0]][: 1 if size == 1 else 3]
LAYOUTS = torch.contiguous_format, torch.channels_last
n = 0
for dtype, layout, shares, way in itertools.product(TOLERANCES, LAYOUTS, SHARES, WAYS):
    what = dtype, layout, shares, way
    state = torch.float64 if dtype is torch.float64 else torch.float32
    torch.manual_seed(0)
    whole = nn.BatchNorm2d(5).to(device, torch.float64)
    mine = nn.BatchNorm2d(5).to(device, state)
    if way != "scope":
        mine = ls.nn.convert_sync_batchnorm(mine)
    x = (torch.randn(sum(shares), 5, 4, 3) + 0.5).to(device, dtype).contiguous(memory_format=layout)
    dy = torch.randn(x.shape).to(x)
    x_whole = x.to(torch.float64, copy=True).requires_grad_()
    y = whole(x_whole)
    y.backward(dy.double())
    part = x.split(shares)[rank].contiguous(memory_format=layout).requires_grad_()
    with ls.nn.SyncBatchNormScope() if way == "scope" else contextlib.nullcontext():
        got = mine(part)
        got.backward(dy.split(shares)[rank])
    close(got, y.split(shares)[rank], dtype, TOLERANCES[dtype], (what, "output"))
    close(part.grad, x_whole.grad.split(shares)[rank], dtype, TOLERANCES[dtype], (what, "gradient"))
    tolerance = 10 * TOLERANCES[state]
    # ATen's kernels round partial sums of them to the activations' type, other than in channels-last.
    of_sums = max(tolerance, 4 * TOLERANCES[dtype])
    close(total(mine.weight.grad), whole.weight.grad, state, of_sums, (what, "weight"))
    close(total(mine.bias.grad), whole.bias.grad, state, of_sums, (what, "bias"))
    close(mine.running_mean, whole.running_mean, state, tolerance, (what, "running mean"))
    close(mine.running_var, whole.running_var, state, tolerance, (what, "running variance"))
    n += 1
if rank == 0:
    print(n, "right")
dist.destroy_process_group()
"""

# Steps of torch's DistributedDataParallel, with layers that were converted or in a scope.
TRAINING = """
import contextlib, copy, torch, torch.distributed as dist, lockstep as ls, lockstep.nn
from torch import nn
torch.set_num_threads(1)
dist.init_process_group({backend!r})
rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device({device!r})
torch.manual_seed(0)
first = nn.Sequential(
    nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten()
).to(device, torch.float64)
batches = [torch.randn(3 * size, 5, 8, 8, dtype=torch.float64).to(device) for _ in range(4)]

def train(net, share, scope):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        with scope():
            net(share(batch)).pow(3).mean().backward()
        optimizer.step()
    return net

whole = train(copy.deepcopy(first), lambda x: x, contextlib.nullcontext).state_dict()
for way in "layer", "scope":
    net, scope = copy.deepcopy(first), ls.nn.SyncBatchNormScope
    if way == "layer":
        net, scope = ls.nn.convert_sync_batchnorm(net), contextlib.nullcontext
    train(nn.parallel.DistributedDataParallel(net), lambda x: x.chunk(size)[rank], scope)
    for name, value in net.state_dict().items():
        assert value.device.type == device.type, name
        error = (value - whole[name]).abs().max().item()
        assert error <= 1e-9, (way, name, error)
print("trained")
dist.destroy_process_group()
"""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_two_ranks_on_one_device(run_ranks, backend, device):
    printed = run_ranks(2, PROGRAM.format(backend=backend, device=device), prelude="")
    n_ways = 3 if (backend, device) == ("gloo", "cuda") else 2
    assert f"{24 * n_ways} right" in printed, printed


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_train_on_one_device(run_ranks, device):
    backend = "lockstep" if device == "cpu" else "cpu:lockstep,cuda:gloo"
    printed = run_ranks(2, TRAINING.format(backend=backend, device=device), prelude="")
    assert printed.count("trained") == 2, printed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("backend", ["nccl", "cpu:lockstep,cuda:nccl"])
def test_one_rank_over_nccl(run_ranks, backend):
    assert "16 right" in run_ranks(1, PROGRAM.format(backend=backend, device="cuda"), prelude="")
    assert "trained" in run_ranks(1, TRAINING.format(backend=backend, device="cuda"), prelude="")
