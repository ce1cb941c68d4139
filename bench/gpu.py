#!/usr/bin/env python3
"""SyncBatchNorm on a device beside PyTorch's, and a profile of a training step: `./dev gpu` runs it on a GPU.

usage: gpu.py [--device cuda|cpu] [--shape N,C,H,W ...] [--turns T]

Milliseconds of forward and of forward and backward: the median over turns in which the layers alternate. One rank:
torch's BatchNorm, torch's SyncBatchNorm (which is BatchNorm then) and lockstep's. Two ranks that share the device: torch's
SyncBatchNorm over Gloo (NCCL refuses two ranks on one GPU) and lockstep's over shared memory. If torchvision is there,
also a training step of ResNet-18 with these layers, and what the one of one rank with lockstep's spends its time on.
"""

import argparse
import copy
import functools
import itertools
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

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}
RANKS = {1: "one rank", 2: "two ranks"}


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
            taken = tuple(milliseconds(x.device, call) for call in (functools.partial(layer, x), functools.partial(both, layer)))
            if turn >= 3:  # the first warm up
                for list_, t in zip(times[name], taken, strict=True):
                    list_.append(t)
    return {name: [statistics.median(t) for t in taken] for name, taken in times.items()}


def say(*text):
    if dist.get_rank() == 0:
        print(*text, flush=True)


def layers_table(kinds, arguments):
    first = next(iter(kinds))
    for shape in arguments.shape:
        plain = nn.BatchNorm2d(shape[1]).to(arguments.device)
        layers = {name: convert(copy.deepcopy(plain)) for name, convert in kinds.items()}
        say(f"\n{RANKS[dist.get_world_size()]}, {shape}: ms of forward / of forward and backward; in brackets: times {first}")
        for (type_name, dtype), (layout_name, layout) in itertools.product(TYPES.items(), LAYOUTS.items()):
            x = torch.randn(shape, device=arguments.device).to(dtype).contiguous(memory_format=layout)
            figures = measure(layers, x.requires_grad_(), arguments.turns)
            cells = [
                f"{name} {f:.3f} / {b:.3f} ({f / figures[first][0]:.2f} / {b / figures[first][1]:.2f})"
                for name, (f, b) in figures.items()
            ]
            say(f"  {type_name:5} {layout_name:14} " + "; ".join(cells))


def steps_table(kinds, arguments, profiled=None):
    try:
        from torchvision.models import resnet18
    except ImportError:
        say("\nno torchvision: no step of ResNet-18")
        return
    pixels, batch = (224, 32) if arguments.device.type == "cuda" else (32, 2)
    x = torch.randn(batch, 3, pixels, pixels, device=arguments.device)
    labels = torch.randint(0, 1000, (batch,), device=arguments.device)

    def step_of(convert):
        model = convert(resnet18().to(arguments.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()

        return step

    steps = {name: step_of(convert) for name, convert in kinds.items()}
    times = {name: [] for name in steps}
    for turn in range(arguments.turns + 3):
        for name, step in steps.items():
            taken = milliseconds(arguments.device, step)
            if turn >= 3:
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    first = next(iter(medians.values()))
    cells = [f"{name} {taken:.2f} ({taken / first:.2f})" for name, taken in medians.items()]
    say(f"\n{RANKS[dist.get_world_size()]}, a step of ResNet-18, f32, batch {batch}, {pixels} x {pixels}, ms: " + "; ".join(cells))
    if profiled:
        with torch.profiler.profile() as profiler:
            milliseconds(arguments.device, steps[profiled])
        by = "self_device_time_total" if arguments.device.type == "cuda" else "self_cpu_time_total"
        say(profiler.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=60))


def one_rank(arguments):
    dist.init_process_group("nccl" if arguments.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    lockstep.init_dist()
    ours = "lockstep.nn.SyncBatchNorm"
    kinds = {
        "BatchNorm": lambda module: module,
        "torch.nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
        ours: lambda module: lockstep.nn.convert_sync_batchnorm(module, lockstep.default_group()),
    }
    if arguments.device.type == "cpu":
        del kinds["torch.nn.SyncBatchNorm"]  # it runs on GPUs only
    layers_table(kinds, arguments)
    steps_table(kinds, arguments, profiled=ours)
    dist.destroy_process_group()


def rank_of_two(arguments):
    dist.init_process_group("lockstep")
    kinds = {"BatchNorm, not synchronised": lambda module: module}
    if arguments.device.type == "cuda":
        gloo = dist.new_group(backend="gloo")
        kinds["torch.nn.SyncBatchNorm over Gloo"] = lambda module: nn.SyncBatchNorm.convert_sync_batchnorm(module, gloo)
    kinds["lockstep.nn.SyncBatchNorm"] = lockstep.nn.convert_sync_batchnorm
    layers_table(kinds, arguments)
    steps_table(kinds, arguments)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--shape",
        nargs="+",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[[32, 64, 56, 56], [32, 256, 14, 14]],
    )
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
