#!/usr/bin/env python3
"""Whole training steps of 2 ranks, beside what a user would do instead, in one run.

usage: training_steps.py [--json FILE | --layers | --settings] [--model MODEL]

Of each network: lockstep in C++ (bench_training_step over the same PyTorch, where it is built) and in Python,
PyTorch's DistributedDataParallel over Gloo, whose BatchNorm sees one rank's images, and one process of 2 threads. All
take turns, with a batch of 32 images in all. Prints images per second, the median of the turns, and by how much the
loss of the last step differs from that of the one process, which has the whole batch. The scale of that is by how much
one process of 1 thread differs from one of 2. In shards of 1 thread each, C++ only, the loss and all parameters must have
the same bits on 2 ranks as in one process. FILE gets rows for scripts/performance.py.

--layers: instead, milliseconds of a step: of one process, and of 1 and 2 ranks of 1 thread and half of the batch each, with
no layer (ranks that know nothing of each other), with SyncBatchNorm, with DistributedDataParallel, and with both; in Python
with the options that PyTorch's has by default.

--settings: instead, images per second in Python, in f32, of one process and of 2 ranks, with each of SETTINGS.

--rank MODEL TYPE BACKEND STEPS THREADS|LAYERS [channels-last]: one of these ranks, in Python.
"""

import argparse
import ctypes.util
import itertools
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
N_STEPS = {("convnet", "f32"): 400, ("resnet18", "f32"): 6, ("resnet18", "f64"): 6, ("resnet18", "bf16"): 6}
N_SHARDS = "4"
LAYERS = ("none", "sync", "ddp", "both")
MOST_F64 = 1e-12
# What bench/nn/rank.hpp sets in C++: else glibc returns each step's memory, and the next step has page faults.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
# Of the environment, and the layout of images and weights.
SETTINGS = {
    "none": {},
    "glibc keeps memory": KEEPS_MEMORY,
    "glibc, huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"},
    "tcmalloc": {"LD_PRELOAD": "libtcmalloc_minimal.so.4"},
    "channels-last": {},
}


def run_rank(model, dtype, backend, n_steps, option, is_channels_last):
    """backend: "lockstep", "gloo", or "none", one process. option: THREADS, or one of LAYERS, with half of the batch."""
    import torch
    import torch.distributed as dist
    from python_ranks import convnet, resnet18
    from torch.nn.parallel import DistributedDataParallel

    rank, n_ranks = 0, 1
    if backend == "lockstep":
        import lockstep.nn
    torch.set_num_threads(int(option) if option.isdigit() else 1)
    if backend != "none":
        dist.init_process_group(backend)
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
    is_small = model == "convnet"
    kind = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(1)
    net = (convnet() if is_small else resnet18())[0].to(kind)
    torch.manual_seed(2)
    size = 28 if is_small else 64
    x = torch.randn(N_IMAGES, 1 if is_small else 3, size, size)
    labels = torch.randint(10 if is_small else 1000, (N_IMAGES,))
    n_parts = 2 if option in LAYERS else n_ranks
    x, labels = x.chunk(n_parts)[rank].to(kind), labels.chunk(n_parts)[rank]
    if is_channels_last:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    if option in ("sync", "both") or (backend == "lockstep" and option not in LAYERS):
        net = lockstep.nn.convert_sync_batchnorm(net)
    if option in ("ddp", "both") or (n_ranks > 1 and option not in LAYERS):
        # The buffers of SyncBatchNorm are equal, and those of BatchNorm do not change the loss.
        better = {} if option in LAYERS else {"gradient_as_bucket_view": True, "forward_sync_buffers": False}
        net = DistributedDataParallel(net, **better)
    sgd = torch.optim.SGD(net.parameters(), 1e-3)

    def step():
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x).to(torch.promote_types(kind, torch.float32)), labels)
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
    if backend != "none":
        dist.destroy_process_group()


def launcher(n_ranks, is_bound=True):
    """What starts ranks, each bound to a core, or one process on all cores."""
    bind = ["--bind", "core"] if is_bound and n_ranks > 1 else []
    return [LOCKSTEP, "run", "-n", str(n_ranks), *bind, "--"]


def candidates(model, dtype):
    """By name, the command, and the name of the one process in the same language whose loss it should have."""
    n_steps = str(N_STEPS[model, dtype])
    python = [sys.executable, __file__, "--rank", model, dtype]
    ranks, alone = launcher(2), launcher(1)
    found = {
        "lockstep, Python": ([*ranks, *python, "lockstep", n_steps, "1"], "1 process, Python"),
        "Gloo": ([*ranks, *python, "gloo", n_steps, "1"], "1 process, Python"),
        "1 process, Python": ([*alone, *python, "none", n_steps, "2"], "1 process, Python"),
        "1 thread, Python": ([*alone, *python, "none", n_steps, "1"], "1 process, Python"),
    }
    if os.path.exists(PROGRAM):
        program = [PROGRAM, model, dtype]
        found["lockstep, C++"] = ([*ranks, *program, "1", n_steps], "1 process, C++")
        found["1 process, C++"] = ([*alone, *program, "2", n_steps], "1 process, C++")
        found["1 thread, C++"] = ([*alone, *program, "1", n_steps], "1 process, C++")
        if dtype != "bf16":
            found["lockstep, C++, shards"] = ([*ranks, *program, "1", n_steps, N_SHARDS], "1 process, C++, shards")
            found["1 process, C++, shards"] = ([*alone, *program, "1", n_steps, N_SHARDS], "1 process, C++, shards")
    return found


def figures_of(command, **variables):
    env = {**os.environ, **variables}
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout)


def print_table(title, columns, figures):
    """figures: by row and column, those of the turns."""
    print(f"\n{title:24}" + "".join(f"{column:>32}" for column in columns))
    for row in dict.fromkeys(row for row, _ in figures):
        turns = [figures[row, column] for column in columns]
        cells = (f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in turns)
        print(f"{row:24}" + "".join(f"{cell:>32}" for cell in cells), flush=True)


def measure_layers(models):
    for (model, dtype), n_steps in N_STEPS.items():
        if dtype == "f64" or model not in models:
            continue
        rank = [model, dtype]
        programs = {"Python": [sys.executable, __file__, "--rank", *rank]}
        if os.path.exists(PROGRAM):
            programs["C++"] = [PROGRAM, *rank]
        commands = {}
        for language, program in programs.items():
            lockstep, end = (["lockstep"], [str(n_steps)]) if language == "Python" else ([], ["1", str(n_steps)])
            alone = ["none", str(n_steps), "2"] if language == "Python" else ["2", str(n_steps)]
            commands["1 process, 2 threads", language] = [*launcher(1), *program, *alone]
            for n_ranks, layers in itertools.product((1, 2), LAYERS):
                name = f"{n_ranks} rank{'s'[: n_ranks - 1]}, {layers}"
                commands[name, language] = [*launcher(n_ranks), *program, *lockstep, *end, layers]
        times = {key: [] for key in commands}
        for _ in range(N_TURNS):
            for key, command in commands.items():
                times[key].append(1e3 * N_IMAGES / figures_of(command, **KEEPS_MEMORY)["images_per_second"])
        print_table(f"{model} {dtype}, ms", programs, times)


def measure_settings(models):
    for name in "jemalloc", "tcmalloc_minimal":
        if ctypes.util.find_library(name) is None:
            sys.exit(f"training_steps.py: there is no lib{name}: call it by ./dev bench steps --settings, which installs it")
    for name in {variable for variables in SETTINGS.values() for variable in variables}:
        os.environ.pop(name, None)
    for model, dtype in N_STEPS:
        if dtype != "f32" or model not in models:
            continue
        n_steps = str(N_STEPS[model, dtype])
        python = [sys.executable, __file__, "--rank", model, dtype]
        ranks = [*python, "lockstep", n_steps, "1"]
        commands = {
            "1 process": [*launcher(1), *python, "none", n_steps, "2"],
            "2 ranks": [*launcher(2, is_bound=False), *ranks],
            "2 ranks, bound": [*launcher(2), *ranks],
        }
        rates = {(name, of): [] for name in SETTINGS for of in commands}
        for _ in range(N_TURNS):
            for name, of in rates:
                layout = [name] if name == "channels-last" else []
                rates[name, of].append(figures_of([*commands[of], *layout], **SETTINGS[name])["images_per_second"])
        print_table(f"{model} {dtype}, images/s", commands, rates)


def main():
    if sys.argv[1:2] == ["--rank"]:
        model, dtype, backend, n_steps, option, *layout = sys.argv[2:]
        return run_rank(model, dtype, backend, int(n_steps), option, layout == ["channels-last"])
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", help="file for the rows")
    what.add_argument("--layers", action="store_true", help="what each layer adds to a step")
    what.add_argument("--settings", action="store_true", help="what allocators, pages, binding and layout change")
    parser.add_argument("--model", choices=sorted({model for model, _ in N_STEPS}), help="only this network")
    options = parser.parse_args()
    models = {model for model, _ in N_STEPS if options.model in (None, model)}
    if options.settings:
        return measure_settings(models)
    if options.layers:
        return measure_layers(models)
    rows = []
    for model, dtype in N_STEPS:
        if model not in models:
            continue
        print(f"\n{model + ' ' + dtype:24}{'images/s':>10}{'least':>10}{'most':>10}   loss differs by")
        found = candidates(model, dtype)
        turns = {name: [] for name in found}
        for _ in range(N_TURNS):
            for name, (command, _) in found.items():
                turns[name].append(figures_of(command, **KEEPS_MEMORY))
        rates = {name: [turn["images_per_second"] for turn in of_name] for name, of_name in turns.items()}
        losses = {name: of_name[0]["loss"] for name, of_name in turns.items()}
        differences = {name: abs(losses[name] - losses[alone]) for name, (_, alone) in found.items()}
        for name, (_, alone) in found.items():
            difference = differences[name]
            if name.endswith("shards") and len({turn["bits"] for turn in turns[name] + turns[alone]}) > 1:
                sys.exit(f"{name}: not the same bits as {alone}")
            if dtype == "f64" and not name.startswith("Gloo") and difference > MOST_F64:
                sys.exit(f"{name}: its loss differs by {difference} from that of one process")
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
