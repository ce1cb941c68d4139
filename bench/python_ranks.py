#!/usr/bin/env python3
"""torch.distributed over lockstep beside Gloo, and lockstep called directly: 2 ranks, in one run.

usage: python_ranks.py [--max BYTES] [--seconds S] [--json FILE]

Prints a row for each operation and size: median microseconds of a call, the slower rank's, and how many times as long
Gloo takes. "directly" is a function of lockstep, of an array of NumPy, "tensor" the same of a tensor. The backends take
turns, several times, so that both see the same load of the machine. Models: the median of a training step, and what
communication adds to it, compared with the same wrapper over a group of one rank.
FILE gets rows for scripts/performance.py: of each operation of torch.distributed Gloo's time over ours, of lockstep called
directly the microseconds, of each model what lockstep adds over what Gloo adds.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import lockstep

sys.path.append(os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "scripts"))
from performance_goals import bytes_text

N_RANKS = 2
N_TURNS = 5


def operations(rank, group, n):
    """By name, on n bytes."""
    x, y = torch.ones(n // 4), torch.ones(n // 4)
    both, parts = torch.ones(N_RANKS * x.numel()), [torch.empty_like(x) for _ in range(N_RANKS)]
    from_both = both.clone()
    root = 0
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_reduce, async": lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(x, root, group=group),
        "reduce": lambda: dist.reduce(x, root, group=group),
        "all_gather, list": lambda: dist.all_gather(parts, x, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(both, x, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(y, both, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(both, from_both, group=group),
        "gather": lambda: dist.gather(x, parts if rank == root else None, root, group=group),
        "scatter": lambda: dist.scatter(x, parts if rank == root else None, root, group=group),
        "send and recv": lambda: dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group),
    }


def small_operations(group):
    objects = [None] * N_RANKS
    return {
        "barrier": lambda: dist.barrier(group),
        "all_gather_object": lambda: dist.all_gather_object(objects, {"loss": 0.5, "step": 7}, group=group),
    }


def convnet():
    layers, channels = [], 1
    for width in 16, 32, 64:
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)), torch.randn(16, 1, 28, 28)


class Block(nn.Module):
    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out))
        self.shortcut = nn.Identity()
        if n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x):
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet18():
    """ResNet-18 (He et al., 2015), 11.7 million parameters."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    n_in = 64
    for n_out in 64, 128, 256, 512:
        layers += [Block(n_in, n_out, 1 if n_out == 64 else 2), Block(n_out, n_out, 1)]
        n_in = n_out
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1000))
    return net, torch.randn(8, 3, 64, 64)


def perceptron():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)), torch.randn(16, 256)


def step_of(model, data):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def steps(group):
    """(name, what makes the model and its data, a step of its wrapper over the group)."""
    from torch.distributed.fsdp import fully_shard  # takes a second, which a rank that is started again need not

    for name, make in (("convnet", convnet), ("perceptron", perceptron), ("ResNet-18", resnet18)):
        model, data = make()
        yield f"DDP, {name}", make, step_of(DistributedDataParallel(model, process_group=group), data)
    model, data = perceptron()
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model[0], model[2], model:
        fully_shard(layer, mesh=mesh)
    yield "FSDP2, perceptron", perceptron, step_of(model, data)


def microseconds(call, n_calls):
    began = time.perf_counter()
    for _ in range(n_calls):
        call()
    return (time.perf_counter() - began) / n_calls * 1e6


def slower(value):
    both = torch.tensor([value])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both.item()


def measure(calls, seconds):
    """calls: by backend. Returns the medians, the same on all ranks."""
    n_calls = {}
    for backend, call in calls.items():
        call()
        n_calls[backend] = max(1, int(seconds / N_TURNS / len(calls) / (slower(microseconds(call, 2)) * 1e-6)))
        n_calls[backend] = min(n_calls[backend], 2000)
    turns = {backend: [] for backend in calls}
    for _ in range(N_TURNS):
        for backend, call in calls.items():
            dist.barrier()
            turns[backend].append(slower(microseconds(call, n_calls[backend])))
    return {backend: statistics.median(values) for backend, values in turns.items()}


def add_rows(rows, name, size, medians, base=0):
    if base:
        rows.append({"name": f"{name}: added", "ratio": (medians["lockstep"] - base) / max(medians["gloo"] - base, 1e-9)})
        return
    if size:
        name += f" {bytes_text(size)}"
    rows.append({"name": f"dist.{name}", "ratio": medians["gloo"] / medians["lockstep"]})
    if "directly" in medians:
        rows.append({"name": f"lockstep.{name}", "ratio": medians["directly"]})
    if "tensor" in medians:
        rows.append({"name": f"lockstep.{name} of a tensor", "ratio": medians["tensor"]})


def print_row(name, size, medians, base=0):
    columns = ("gloo", "lockstep", "one rank", "no wrapper") if base else ("gloo", "lockstep", "directly", "tensor")
    values = [medians.get(backend) for backend in columns]
    cells = "".join(f"{'' if value is None else f'{value:.1f}':>12}" for value in values)
    times = (medians["gloo"] - base) / max(medians["lockstep"] - base, 1e-9)
    print(f"{name:24}{size:>10}{cells}  {times:8.1f}x", flush=True)


def run(rank, options, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names that torch is about to change
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(N_RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(N_RANKS),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
                      TORCHELASTIC_RUN_ID=os.path.basename(os.path.dirname(store)))  # fmt: skip
    dist.init_process_group("lockstep", init_method=f"file://{store}", rank=rank, world_size=N_RANKS)
    lockstep.init_dist()
    groups = {"gloo": dist.new_group(backend="gloo"), "lockstep": dist.new_group()}
    of_one = [dist.new_group([r]) for r in range(N_RANKS)][rank]
    rows = []

    def say(*row):
        if rank == 0:
            print_row(*row)
            add_rows(rows, *row)

    if rank == 0:
        print(f"{'':24}{'bytes':>10}{'gloo':>12}{'lockstep':>12}{'directly':>12}{'tensor':>12}  {'gloo is':>9}")
    small = {backend: small_operations(group) for backend, group in groups.items()}
    for name in small["gloo"]:
        calls = {backend: by_name[name] for backend, by_name in small.items()}
        directly = {
            "barrier": lockstep.barrier,
            "all_gather_object": lambda: lockstep.all_gather_object({"loss": 0.5, "step": 7}),
        }
        calls["directly"] = directly[name]
        say(name, "", measure(calls, options.seconds))
    size = 4
    while size <= options.max:
        by_backend = {backend: operations(rank, group, size) for backend, group in groups.items()}
        for name in by_backend["gloo"]:
            calls = {backend: by_name[name] for backend, by_name in by_backend.items()}
            if name == "all_reduce":
                x = torch.ones(size // 4)
                array = x.numpy()
                calls["directly"] = lambda x=array: lockstep.all_reduce(x)
                calls["tensor"] = lambda x=x: lockstep.all_reduce(x)
            say(name, size, measure(calls, options.seconds))
        size *= 64
    if rank == 0:
        print(f"\n{'a step':34}{'gloo':>12}{'lockstep':>12}{'one rank':>12}{'no wrapper':>12}   gloo adds")
    # The wrapper over a group of one rank computes all that it does otherwise, and communicates nothing.
    candidates = {**groups, "one rank": of_one}
    for of_model in zip(*(steps(group) for group in candidates.values()), strict=True):
        calls = {backend: step for backend, (_, _, step) in zip(candidates, of_model, strict=True)}
        name, make, _ = of_model[0]
        calls["no wrapper"] = step_of(*make())
        medians = measure(calls, 8 * options.seconds)
        say(name, "", medians, medians["one rank"])
    lockstep.destroy_dist()
    dist.destroy_process_group()
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows}, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--seconds", type=float, default=1.0, help="about, for each row")
    parser.add_argument("--json", help="file for the ratios")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(N_RANKS):
            child = os.fork()
            if child == 0:
                try:
                    run(rank, options, f"{folder}/store")
                    code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    code = 1
                sys.stdout.flush()
                os._exit(code)
            ranks.append(child)
        return any(os.waitpid(child, 0)[1] for child in ranks)


if __name__ == "__main__":
    sys.exit(main())
