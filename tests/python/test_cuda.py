"""lockstep.nn on a device: ranks that share it equal one rank that has the whole batch. On the CPU too, everywhere."""

import pytest

torch = pytest.importorskip("torch")

PROGRAM = """
import copy, sys, torch, torch.distributed as dist, lockstep as ls, lockstep.nn
from torch import nn
torch.set_num_threads(1)
dist.init_process_group({backend!r})
rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device({device!r})

def total(x):
    x = x.cpu()
    ls.all_reduce(x) if {backend!r} == "nccl" else dist.all_reduce(x)
    return x

def close(got, expected, tolerance, what):
    assert got.device.type == expected.device.type or got.device.type == "cpu", what
    assert got.dtype == expected.dtype, what
    error = (got.double().cpu() - expected.double().cpu()).abs().max().item() if got.numel() else 0
    assert error <= tolerance, (what, error)

# 16-bit types: two roundings of values about 1 may differ by one step of bf16.
TOLERANCES = {{torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-2, torch.bfloat16: 4e-2}}
SHARES = [[2] * size, [5] + [2] * (size - 1), [2] * (size - 1) + [0]][: 1 if size == 1 else 3]
n = 0
for dtype, tolerance in TOLERANCES.items():
    for layout in torch.contiguous_format, torch.channels_last:
        for shares in SHARES:
            torch.manual_seed(0)
            whole = nn.BatchNorm2d(5).to(device, torch.float64 if dtype is torch.float64 else torch.float32)
            mine = ls.nn.convert_sync_batchnorm(copy.deepcopy(whole))
            x = (torch.randn(sum(shares), 5, 4, 3) + 0.5).to(device, dtype).contiguous(memory_format=layout)
            x.requires_grad_()
            y = whole(x)
            dy = torch.randn(y.shape).to(y)
            y.backward(dy)
            part = x.detach().split(shares)[rank].contiguous(memory_format=layout).requires_grad_()
            got = mine(part)
            got.backward(dy.split(shares)[rank])
            what = dtype, layout, shares
            close(got, y.split(shares)[rank], tolerance, (what, "output"))
            close(part.grad, x.grad.split(shares)[rank], tolerance, (what, "gradient"))
            close(total(mine.weight.grad), whole.weight.grad, 10 * tolerance, (what, "weight"))
            close(total(mine.bias.grad), whole.bias.grad, 10 * tolerance, (what, "bias"))
            close(mine.running_mean, whole.running_mean, tolerance, (what, "running mean"))
            close(mine.running_var, whole.running_var, tolerance, (what, "running variance"))
            n += 1
if rank == 0:
    print(n, "right")
dist.destroy_process_group()
"""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["lockstep", "gloo"])
def test_two_ranks_on_one_device(run_ranks, backend, device):
    printed = run_ranks(2, PROGRAM.format(backend=backend, device=device), prelude="")
    assert "24 right" in printed, printed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_rank_over_nccl(run_ranks):
    assert "8 right" in run_ranks(1, PROGRAM.format(backend="nccl", device="cuda"), prelude="")
