#!/usr/bin/env python3
"""Whole training steps of 2 ranks, beside what a user would do instead, in one run.

usage: training_steps.py [--json FILE]

Of each network: lockstep in C++ (bench_training_step over the same PyTorch, where it is built) and in Python,
PyTorch's DistributedDataParallel over Gloo, whose BatchNorm sees one rank's images, and one process of 2 threads. All
take turns, with a batch of 32 images in all. Prints images per second, the median of the turns, and by how much the
loss of the last step differs from that of the one process, which has the whole batch. FILE gets rows for
scripts/performance.py.

usage: training_steps.py --rank MODEL TYPE BACKEND STEPS   one of these ranks, in Python
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

LOCKSTEP = "build/release/src/cli/lockstep"
PROGRAM = "build/torch-venv-bench/bench/bench_training_step"
N_TURNS = 3
N_UNTIMED = 2  # the first allocates, and then buckets are rebuilt
N_IMAGES = 32
N_STEPS = {("convnet", "f32"): 400, ("resnet18", "f32"): 6, ("resnet18", "bf16"): 6}


def run_rank(model, dtype, backend, n_steps):
    """backend: "lockstep", "gloo", or "none", one process."""
    import torch
    import torch.distributed as dist
    from python_ranks import convnet, resnet18
    from torch.nn.parallel import DistributedDataParallel

    rank, n_ranks = 0, 1
    if backend == "lockstep":
        import lockstep.nn
    if backend == "none":
        torch.set_num_threads(2)
    else:
        torch.set_num_threads(1)
        dist.init_process_group(backend)
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
    is_small = model == "convnet"
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    torch.manual_seed(1)
    net = (convnet() if is_small else resnet18())[0].to(kind)
    torch.manual_seed(2)
    size = 28 if is_small else 64
    x = torch.randn(N_IMAGES, 1 if is_small else 3, size, size)
    labels = torch.randint(10 if is_small else 1000, (N_IMAGES,))
    x, labels = x.chunk(n_ranks)[rank].to(kind), labels.chunk(n_ranks)[rank]
    if backend == "lockstep":
        net = lockstep.nn.convert_sync_batchnorm(net)
    if n_ranks > 1:
        net = DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), 1e-3)

    def step():
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x).float(), labels)
        loss.backward()
        sgd.step()
        return loss.item()

    for _ in range(N_UNTIMED):
        step()
    if n_ranks > 1:
        dist.barrier()
    began = time.perf_counter()
    for _ in range(n_steps):
        loss = step()
    if n_ranks > 1:
        dist.barrier()
    seconds = time.perf_counter() - began
    mean = torch.tensor(loss, dtype=torch.float64)
    if n_ranks > 1:
        dist.all_reduce(mean)
    if rank == 0:
        figures = {"images_per_second": N_IMAGES * n_steps / seconds, "loss": mean.item() / n_ranks}
        print(json.dumps(figures), flush=True)
    if backend == "gloo":  # ~ProcessGroupGloo may join its thread, which waits for the GIL, under the GIL
        dist.barrier()
        os._exit(0)
    if n_ranks > 1:
        dist.destroy_process_group()


def candidates(model, dtype):
    """By name, the command, and the name of the one process in the same language."""
    n_steps = str(N_STEPS[model, dtype])
    python = [sys.executable, __file__, "--rank", model, dtype]
    ranks = [LOCKSTEP, "run", "-n", "2", "--"]
    alone = [LOCKSTEP, "run", "-n", "1", "--"]
    found = {
        "lockstep, Python": ([*ranks, *python, "lockstep", n_steps], "1 process, Python"),
        "Gloo": ([*ranks, *python, "gloo", n_steps], "1 process, Python"),
        "1 process, Python": ([*alone, *python, "none", n_steps], "1 process, Python"),
    }
    if os.path.exists(PROGRAM):
        program = [PROGRAM, model, dtype]
        found["lockstep, C++"] = ([*ranks, *program, "1", n_steps], "1 process, C++")
        found["1 process, C++"] = ([*alone, *program, "2", n_steps], "1 process, C++")
    return found


def main():
    if sys.argv[1:2] == ["--rank"]:
        model, dtype, backend, n_steps = sys.argv[2:]
        return run_rank(model, dtype, backend, int(n_steps))
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    rows = []
    for model, dtype in N_STEPS:
        print(f"\n{model + ' ' + dtype:24}{'images/s':>10}{'least':>10}{'most':>10}   loss differs by")
        found = candidates(model, dtype)
        turns = {name: [] for name in found}
        for _ in range(N_TURNS):
            for name, (command, _) in found.items():
                ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                turns[name].append(json.loads(ended.stdout))
        rates = {name: [turn["images_per_second"] for turn in of_name] for name, of_name in turns.items()}
        losses = {name: of_name[0]["loss"] for name, of_name in turns.items()}
        differences = {name: abs(losses[name] - losses[alone]) for name, (_, alone) in found.items()}
        for name in found:
            difference = differences[name]
            # In bf16 a change of one of the first layer's weights by 1 % moves the loss by up to 0.007.
            if dtype == "f32" and name.startswith("lockstep") and difference > differences["Gloo"] / 3:
                sys.exit(f"{name}: its loss differs by {difference} from that of one process")
            rate = statistics.median(rates[name])
            print(f"{name:24}{rate:10.1f}{min(rates[name]):10.1f}{max(rates[name]):10.1f}   {difference:.1e}", flush=True)
            rows.append({"name": f"{name}: {model} {dtype}", "ratio": rate})
            rows.append({"name": f"{name}: {model} {dtype}, loss differs by", "ratio": difference})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
