#!/usr/bin/env python3
"""SyncBatchNorm on a device beside PyTorch's, and a profile of a training step: `./dev gpu` runs it on a GPU.

usage: gpu.py [--device cuda|cpu] [--shape N,C,H,W] [--turns T]

Milliseconds of forward and of forward and backward: the median over turns in which the layers alternate. One rank:
torch's BatchNorm, torch's SyncBatchNorm (which is BatchNorm then) and lockstep's. Two ranks that share the device: torch's
SyncBatchNorm over Gloo (NCCL refuses two ranks on one GPU) and lockstep's over shared memory. Then what a training
step of ResNet-50 with lockstep's layer spends its time on, one rank, if torchvision is there.
"""

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lockstep
import lockstep.nn

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}


def milliseconds(device, f):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(layers, x, turns):
    """By layer: forward, forward and backward."""
    times = {name: ([], []) for name in layers}
    dy = torch.randn_like(x)

    def both(layer):
        x.grad = None
        layer(x).backward(dy)

    for turn in range(turns + 3):
        for name, layer in layers.items():
            taken = milliseconds(x.device, lambda: layer(x)), milliseconds(x.device, lambda: both(layer))
            if turn >= 3:  # the first warm up
                for list_, t in zip(times[name], taken):
                    list_.append(t)
    return {name: [statistics.median(t) for t in taken] for name, taken in times.items()}


def table(layers, arguments, title):
    first = next(iter(layers))
    if dist.get_rank() == 0:
        print(f"\n{title}: ms of forward / of forward and backward; in brackets: times {first}")
    for type_name, dtype in TYPES.items():
        for layout_name, layout in LAYOUTS.items():
            x = torch.randn(arguments.shape, device=arguments.device).to(dtype).contiguous(memory_format=layout)
            figures = measure(layers, x.requires_grad_(), arguments.turns)
            cells = [
                f"{name} {f:.3f} / {b:.3f} ({f / figures[first][0]:.2f} / {b / figures[first][1]:.2f})"
                for name, (f, b) in figures.items()
            ]
            if dist.get_rank() == 0:
                print(f"  {type_name:5} {layout_name:14} " + "; ".join(cells), flush=True)


def one_rank(arguments):
    dist.init_process_group("nccl" if arguments.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = nn.BatchNorm2d(arguments.shape[1]).to(arguments.device)
    lockstep.init_dist()
    layers = {
        "BatchNorm": plain,
        "torch.nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)),
        "lockstep.nn.SyncBatchNorm": lockstep.nn.convert_sync_batchnorm(copy.deepcopy(plain), lockstep.default_group()),
    }
    if arguments.device.type == "cpu":
        del layers["torch.nn.SyncBatchNorm"]  # it runs on GPUs only
    table(layers, arguments, "one rank")
    profile(arguments)
    dist.destroy_process_group()


def rank_of_two(arguments):
    dist.init_process_group("lockstep")
    plain = nn.BatchNorm2d(arguments.shape[1]).to(arguments.device)
    layers = {"BatchNorm, not synchronised": plain}
    if arguments.device.type == "cuda":
        layers["torch.nn.SyncBatchNorm over Gloo"] = nn.SyncBatchNorm.convert_sync_batchnorm(
            copy.deepcopy(plain), dist.new_group(backend="gloo")
        )
    layers["lockstep.nn.SyncBatchNorm"] = lockstep.nn.convert_sync_batchnorm(copy.deepcopy(plain))
    table(layers, arguments, "two ranks on one device")
    dist.destroy_process_group()


def profile(arguments):
    try:
        from torchvision.models import resnet50
    except ImportError:
        print("\nno torchvision: no profile of ResNet-50")
        return
    size, batch = (224, 32) if arguments.device.type == "cuda" else (32, 2)
    model = lockstep.nn.convert_sync_batchnorm(resnet50(), lockstep.default_group()).to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, 3, size, size, device=arguments.device)
    labels = torch.randint(0, 1000, (batch,), device=arguments.device)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    for _ in range(3):
        step()
    print(f"\nResNet-50, batch {batch}: {statistics.median(milliseconds(x.device, step) for _ in range(5)):.2f} ms a step", flush=True)
    with torch.profiler.profile() as profiler:
        milliseconds(x.device, step)
    by = "self_device_time_total" if arguments.device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=60))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--shape", type=lambda text: [int(n) for n in text.split(",")], default=[32, 256, 56, 56])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rank-of-two", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank_of_two:
        rank_of_two(arguments)
        return
    one_rank(arguments)
    command = Path(sys.executable).parent / "lockstep"
    done = subprocess.run([command, "run", "-n", "2", "--", sys.executable, __file__, *sys.argv[1:], "--rank-of-two"], env=os.environ)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
