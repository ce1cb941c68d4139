#!/usr/bin/env python3
"""Steps per second of a training that loses a rank or a host again and again, of what it makes undisturbed.

usage: ./dev bench elastic [--ranks N] [--seconds S] [--every S] [--checkpoints S,...] [--json FILE]
       ./dev bench elastic --hosts M [--ranks N] [--lease S] [--seconds S] [--every S] [--checkpoints S,...]
       ./dev bench elastic --evictions [--hosts M] [--lease S] [--busy N] [--seconds S] [--limits]
       ./dev bench elastic --lost-ranks N [--ranks N] [--limits]
       ./dev bench elastic --keep

Three trainings, each for S seconds undisturbed and for S seconds in which every 15 seconds (--every) one of the ranks
gets SIGKILL: lockstep-train and lockstep.nn.run_elastic under `lockstep run --elastic 1`, and the peer, the same network over
Gloo under `torchrun --max-restarts`, which restarts all ranks from a checkpoint that is written every 10 seconds, or
once for each of the numbers of --checkpoints.
The two in Python train one convnet with one global batch; the peer's BatchNorm is each rank's own, because torch has
no SyncBatchNorm for CPUs. Steps count if they are not done again: the newest completed one counts. The gap is the median time
from a loss to the first step that was not completed before it.

--hosts: all of them over M hosts of N ranks (1), which are network namespaces, as root. In place of a rank a host
is lost, the others than the first in turn: everything on it gets SIGKILL at once, and its command is started again at once.
A torchrun that ends, because hosts were lost while it formed a world, is started again too.
--evictions: instead, how many hosts (of 4) lockstep takes for lost of which none is, in 300 seconds with a lease of 2 s, beside N
busy processes for each core (4); --limits: fails where there is one.
--lost-ranks: instead, the time from the death of a rank to the first right all_reduce of each other one, over N of them by
lockstep.regroup and over N / 5 by run_elastic, and its parts; --limits: fails where one is above what docs/howto/elastic.md
promises.
--keep: instead, what keeping the state costs in each step, of a network with the tensors of ResNet-18, in Python and C++.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/release"
UCX_MODULE = BUILD / "src/engines/ucx/module/liblockstep-ucx.so"
sys.path.append(str(ROOT / "scripts"))
from over_mpi import Hosts  # noqa: E402

PORT = 29400  # of the first host
BATCH = {"train": 512, "ranks": 512}  # steps of about 50 ms on two cores


# --- a rank of the trainings in Python ------------------------------------------------------------


def train(mode, progress, checkpoint, checkpoint_every=0):
    import torch
    import torch.distributed as dist
    from python_ranks import convnet
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, _ = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    data = TensorDataset(torch.randn(16 * BATCH["ranks"], 1, 28, 28), torch.randint(10, (16 * BATCH["ranks"],)))

    def step(ddp, optimizer, samples, scale):
        images, labels = data[samples]
        loss = torch.nn.functional.cross_entropy(ddp(images), labels) * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def report(rank, step):
        if rank == 0:
            with open(progress, "a") as file:
                file.write(f"{step}\n")

    if mode == "elastic":
        import lockstep.nn

        state = lockstep.nn.ElasticState([model, optimizer])
        sampler = lockstep.nn.ElasticBatchSampler(data, BATCH["ranks"], state)

        def loop():
            ddp = DistributedDataParallel(model)
            with lockstep.nn.SyncBatchNormScope():
                while True:
                    samples = sampler.batch(state.step)
                    step(ddp, optimizer, samples, state.scale(len(samples)))
                    report(lockstep.get_rank(), state.step + 1)
                    state.step_done()

        lockstep.nn.run_elastic(state, loop)
        return
    dist.init_process_group("gloo")
    n_done = 0
    if os.path.exists(checkpoint):
        values = torch.load(checkpoint)
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])
        n_done = values["step"]
    ddp = DistributedDataParallel(model)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    saved = time.monotonic()
    while True:
        first = n_done * BATCH["ranks"] % len(data)
        step(ddp, optimizer, list(range(first + rank, first + BATCH["ranks"], n_ranks)), 1)
        n_done += 1
        report(rank, n_done)
        if rank == 0 and time.monotonic() - saved > float(checkpoint_every):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": n_done}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
            saved = time.monotonic()


# --- a rank of which others are lost --------------------------------------------------------------


class Losses:
    """When one of the full number of ranks has made some steps it ends; the others say when they go on."""

    def __init__(self, log, n_losses):
        self.file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.n_losses, self.n_places, self.n_steps = int(n_losses), int(os.environ["WORLD_SIZE"]), 0
        self.died, self.marks = None, []

    def say(self, *what):
        os.write(self.file, (" ".join(map(str, what)) + "\n").encode())

    def mark(self, part):
        self.marks.append((part, time.monotonic()))

    def step(self, n_done, rank, n_ranks):
        """After a right all_reduce. Returns whether the training is complete."""
        if any(part == "lost" for part, _ in self.marks):
            self.say("alive", *(f"{part}={at:.6f}" for part, at in [*self.marks, ("all_reduce", time.monotonic())]))
        self.marks.clear()
        self.n_steps += 1
        if n_ranks == self.n_places and n_done % 7 == 0 and n_done // 7 % n_ranks == rank and self.n_steps > 3:
            self.say("died", f"{time.monotonic():.6f}")
            os.kill(os.getpid(), signal.SIGKILL)
        return os.fstat(self.file).st_size > 0 and Path(f"/proc/self/fd/{self.file}").read_text().count("died") >= self.n_losses


def go_on_by_hand(log, n_losses):
    import numpy as np

    import lockstep

    losses = Losses(log, n_losses)
    lockstep.init_dist()

    def train(n_done):
        n_done = max(lockstep.all_gather_object(n_done))
        while True:
            x = np.ones(1000)
            lockstep.all_reduce(x)
            assert (x == lockstep.get_world_size()).all()
            n_done += 1
            words = np.array([lockstep.has_waiting_replacements(), losses.step(n_done, *lockstep.get_dist_info())], np.int32)
            lockstep.all_reduce(words, "max")
            lockstep.step_done()
            if words.any():
                return n_done, bool(words[1])

    n_done, is_complete = 0, False
    while not is_complete:
        try:
            n_done, is_complete = train(n_done)
        except (lockstep.PeerLost, lockstep.PeerFailed, lockstep.TimeoutError):
            losses.mark("lost")
        if not is_complete:
            lockstep.regroup()
            losses.mark("regroup")


def go_on_elastic(log, n_losses):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import lockstep.nn
    from lockstep import _backend, _elastic

    torch.set_num_threads(1)
    losses = Losses(log, n_losses)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = lockstep.nn.ElasticState([model, optimizer])

    def timed(module, name, part, before=None):
        original = getattr(module, name)

        def function(*arguments, **options):
            if before and arguments[0]:  # a failure
                losses.mark(before)
            result = original(*arguments, **options)
            losses.mark(part)
            return result

        setattr(module, name, function)

    timed(_elastic, "_leave_torch", "left", before="lost")
    timed(_elastic._world, "regroup", "regroup")
    timed(_backend, "rendezvous", "store")
    timed(_elastic, "_join_torch", "process group")
    timed(_elastic, "_synchronise", "state")

    def train():
        ddp = DistributedDataParallel(model)
        losses.mark("DDP")
        while True:
            x = torch.ones(1000)
            torch.distributed.all_reduce(x)
            assert (x == lockstep.get_world_size()).all()
            complete = torch.tensor(losses.step(state.step, *lockstep.get_dist_info()), dtype=torch.int32)
            torch.distributed.all_reduce(complete, torch.distributed.ReduceOp.MAX)
            if complete:
                return
            ddp(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step_done()

    lockstep.nn.run_elastic(state, train)


def measure_losses(options):
    """Seconds from each death, by part, of each survivor."""
    late = []
    kinds = (
        ("by_hand", "lockstep.regroup", options.lost_ranks, (0.010, 0.100)),
        ("run_elastic", "run_elastic", max(1, options.lost_ranks // 5), (0.050, 0.200)),
    )
    for kind, name, n_losses, limits in kinds:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            command = [str(BUILD / "src/cli/lockstep"), "run", "-n", str(options.ranks), "--elastic", "1", "--", sys.executable, __file__]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            job = subprocess.run([*command, "ranks", kind, str(log), str(n_losses)], env=environment, capture_output=True, text=True)
            if job.returncode != 0:
                sys.exit(f"{name} ended: {job.stderr[-3000:]}")
            lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
        died, passed = None, {}
        for what, rest in lines:
            if what == "died":
                died = float(rest)
                continue
            former = died
            for part, at in (each.rsplit("=", 1) for each in rest.replace(" group", "_group").split()):
                passed.setdefault(part, []).append(float(at) - former)
                former = float(at)
                if part == "lost":
                    noticed = former
            passed.setdefault("after it", []).append(former - noticed)
            passed.setdefault("sum", []).append(former - died)
        print(f"{name}: {n_losses} lost ranks, {len(passed['sum'])} survivors; ms")
        for part, seconds in passed.items():
            seconds.sort()
            median, most = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
            print(f"  {part:14} median {1e3 * median:7.1f}   99 % {1e3 * most:7.1f}   most {1e3 * seconds[-1]:7.1f}", flush=True)
        # A process in which torch is loaded takes the kernel 20 ms to end, and more beside others; nobody hears of it before.
        counted = passed["sum" if kind == "by_hand" else "after it"]
        if counted[len(counted) // 2] > limits[0] or counted[int(len(counted) * 0.99)] > limits[1]:
            late.append(name)
    if options.limits and late:
        sys.exit(f"above the promised times: {', '.join(late)}")


def measure_keep():
    import torch

    import lockstep.nn

    torch.set_num_threads(1)
    widths = [64] * 5 + [128] * 5 + [256] * 5 + [512] * 5
    layers = [layer for width in widths for layer in (torch.nn.Conv2d(width, width, 3, bias=False), torch.nn.BatchNorm2d(width))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1000))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sizes = f"{len(list(model.parameters()))} parameters, {len(list(model.buffers()))} buffers"
    for parts, name in ([model], "model"), ([model, optimizer, schedule], "model, Adam, StepLR"):
        for seed in 1, None:
            state = lockstep.nn.ElasticState(parts, seed=seed)
            times = []
            for _ in range(300):
                began = time.perf_counter()
                for _ in range(10):
                    state._keep()
                times.append((time.perf_counter() - began) / 10)
            times.sort()
            of = f"{name}{', generators' if seed is None else ''}"
            print(f"{of:34} {sizes}: median {1e6 * times[150]:.1f} us, least {1e6 * times[0]:.1f} us", flush=True)
    program = BUILD / "bench/bench_elastic_state"
    if program.exists():
        print(f"{'C++: the same, and step_done':34} ", end="", flush=True)
        subprocess.run([str(BUILD / "src/cli/lockstep"), "run", "-n", "1", "--elastic", "1", "--", str(program)], check=True)


# --- the measurement ------------------------------------------------------------------------------


def children_of(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def newest_step(progress):
    """In the last complete line: a number, or a JSON line of lockstep-train."""
    if not progress.exists():
        return 0
    for line in reversed(progress.read_text().rsplit("\n", 8)[-8:]):
        if line.startswith("{") and line.endswith("}") and '"steps"' in line:
            return json.loads(line)["step"]
        if line.isdigit():
            return int(line)
    return 0


class Training:
    """One that runs, on one host or on several."""

    def __init__(self, name, command_of, progress, hosts, may_end=False):
        """command_of: of a host's number. may_end: a launcher that has ended is started again, as a service is."""
        self.name, self.command_of, self.progress, self.hosts, self.may_end = name, command_of, progress, hosts, may_end
        self.launchers = []

    def __enter__(self):
        for i in range(len(self.hosts.names) if self.hosts else 1):
            self.launchers.append(self.start(i))
        return self

    def start(self, i):
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.hosts:
            variables |= {"LOCKSTEP_UCX": str(UCX_MODULE), "GLOO_SOCKET_IFNAME": "cable"}
            # With one store for agents and ranks a host that comes back waits for an address that nobody writes again.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with open(self.log(i), "a") as output:
            words = [*(self.hosts.on(i) if self.hosts else []), *self.command_of(i)]
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)

    def log(self, i=0):
        return self.progress.with_suffix(f".{i}.log")

    def lose(self, n):
        """A rank, or a host other than the first; n: how many were lost before."""
        if not self.hosts:
            ranks = children_of(self.launchers[0].pid)
            os.kill(ranks[n % len(ranks)], signal.SIGKILL)
            return
        i = 1 + n % (len(self.launchers) - 1)
        self.hosts.kill(i)
        self.launchers[i].wait()
        self.launchers[i] = self.start(i)

    def newest_step(self):
        for i, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                continue
            if self.may_end:
                self.hosts.kill(i)
                self.launchers[i] = self.start(i)
            else:
                sys.exit(f"{self.name} ended: {self.log(i).read_text()[-3000:]}")
        return newest_step(self.progress)

    def wait_for_steps(self, n_steps, seconds=300):
        end = time.monotonic() + seconds
        while self.newest_step() < n_steps:
            if time.monotonic() > end:
                sys.exit(f"{self.name}: not {n_steps} steps in {seconds} s: {self.log().read_text()[-3000:]}")
            time.sleep(0.1)

    def __exit__(self, *_):
        for i, launcher in enumerate(self.launchers):
            if self.hosts:
                self.hosts.kill(i)
            else:
                launcher.terminate()
        for launcher in self.launchers:
            try:
                launcher.wait(timeout=30)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def measure(training, seconds, every):
    """Steps per second; every: seconds between the losses, or None. Also how long after each loss there was a new step."""
    with training:
        training.wait_for_steps(20)  # all ranks have joined
        first, began, n_lost = training.newest_step(), time.monotonic(), 0
        lost, gaps = None, []
        while (passed := time.monotonic() - began) < seconds:
            step = training.newest_step()
            if lost and step > lost[1]:
                gaps.append(passed - lost[0])
                lost = None
            # In the middle of each period, so that the first and the last loss are whole.
            if every and passed > (n_lost + 0.5) * every:
                training.lose(n_lost)
                n_lost += 1
                lost = lost or (passed, training.newest_step())
            time.sleep(0.05)
        if lost:
            gaps.append(passed - lost[0])
        return (training.newest_step() - first) / (time.monotonic() - began), gaps


def lockstep_run(options, hosts, i):
    of_hosts = []
    if hosts:
        of_hosts = ["--nnodes", str(options.hosts), "--node-rank", str(i), "--rdzv", f"{hosts.addresses[0]}:{PORT}"]
        of_hosts += ["--elastic-lease", f"{options.lease:g}"]
    return [str(BUILD / "src/cli/lockstep"), "run", *of_hosts, "-n", str(options.ranks), "--elastic", "1", "--"]


def torchrun(options, hosts, i, keepalive):
    of_hosts = ["--standalone"]
    if hosts:
        of_hosts = [f"--nnodes=1:{options.hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.addresses[0]}:{PORT}"]
        of_hosts += [f"--rdzv-conf=is_host={str(i == 0).lower()},keep_alive_interval={keepalive}", f"--local-addr={hosts.addresses[i]}"]
    return [sys.executable, "-m", "torch.distributed.run", *of_hosts, "--max-restarts=1000", f"--nproc-per-node={options.ranks}"]


def lockstep_train(options, hosts, progress):
    program = [str(BUILD / "examples/train/lockstep-train"), "--batch", str(BATCH["train"]), "--epochs", "1000000"]
    program += ["--threads", "1", "--metrics", str(progress), "--metrics-every", "1"]
    return Training("lockstep-train, run_elastic (C++)", lambda i: [*lockstep_run(options, hosts, i), *program], progress, hosts)


def python_elastic(options, hosts, progress):
    program = [sys.executable, str(Path(__file__).resolve()), "ranks", "elastic", str(progress), ""]
    return Training("lockstep.nn.run_elastic (Python)", lambda i: [*lockstep_run(options, hosts, i), *program], progress, hosts)


def python_restart(options, hosts, progress, checkpoints, keepalive):
    """checkpoints, keepalive: seconds between these. Three of an agent's keepalives late, its host is lost."""
    program = [str(Path(__file__).resolve()), "ranks", "restart", str(progress), f"{progress}.pt", checkpoints]
    name = f"torchrun, Gloo, checkpoints of each {checkpoints} s"
    if hosts:
        name += f", keepalives each {keepalive} s"
    return Training(name, lambda i: [*torchrun(options, hosts, i, keepalive), *program], progress, hosts, bool(hosts))


def measure_trainings(options, hosts, folder):
    # By what they do undisturbed.
    trainings = {"train": [lambda progress: lockstep_train(options, hosts, progress)]}
    trainings["elastic"] = [lambda progress: python_elastic(options, hosts, progress)]
    for checkpoints in options.checkpoints.split(","):
        trainings[f"restart{checkpoints}"] = [
            lambda progress, checkpoints=checkpoints, keepalive=keepalive: python_restart(options, hosts, progress, checkpoints, keepalive)
            for keepalive in ((5, 1) if hosts else (5,))  # 5: the default
        ]
    what = f"{options.hosts} hosts of {options.ranks} rank{'s' * (options.ranks > 1)}" if hosts else f"{options.ranks} ranks"
    print(f"{what}, {options.seconds:g} s each; a {'host lost' if hosts else 'rank killed'} every {options.every:g} s\n")
    print(f"{'':64}{'steps/s':>9}{'losses':>9}{'kept':>8}{'gap, s':>9}{'gaps':>7}")
    rows = []
    for kind, variants in trainings.items():
        undisturbed, _ = measure(variants[0](folder / f"{kind}-undisturbed"), options.seconds, None)
        for k, make in enumerate(variants):
            training = make(folder / f"{kind}-disturbed-{k}")
            disturbed, gaps = measure(training, options.seconds, options.every)
            gap = f"{statistics.median(gaps):9.1f}{len(gaps):7}" if gaps else ""
            print(f"{training.name:64}{undisturbed:9.1f}{disturbed:9.1f}{disturbed / undisturbed:8.1%}{gap}", flush=True)
            rows.append({"name": training.name, "ratio": disturbed / undisturbed})
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows}))


def measure_evictions(options, hosts, folder):
    training = lockstep_train(options, hosts, folder / "evictions")
    n_busy = options.busy * len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(training)
        training.wait_for_steps(20)
        n_lines = len(training.log().read_text().splitlines())
        for _ in range(n_busy):
            busy = stack.enter_context(subprocess.Popen(["sh", "-c", "while :; do :; done"]))
            stack.callback(busy.kill)
        first, end = training.newest_step(), time.monotonic() + options.seconds
        while time.monotonic() < end:
            time.sleep(1)
            n_steps = training.newest_step() - first
        lines = training.log().read_text().splitlines()[n_lines:]
    n_evictions = sum(" is lost: " in line for line in lines)
    n_generations = sum(" generation " in line for line in lines)
    what = f"{options.hosts} hosts, {options.seconds:g} s, a lease of {options.lease:g} s, {n_busy} busy processes"
    print(f"{what}: {n_evictions} evictions, {n_generations} generations, {n_steps} steps", flush=True)
    if options.limits and n_evictions + n_generations > 0:
        sys.exit("\n".join(lines[-40:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, help="in all, or on each host (4, or 1)")
    parser.add_argument("--seconds", type=float, help="of each training (75; evictions: 300)")
    parser.add_argument("--every", type=float, default=15)
    parser.add_argument("--checkpoints", default="10", help="seconds between the peer's checkpoints: 2,10,60")
    parser.add_argument("--json", help="file for the ratios")
    parser.add_argument("--hosts", type=int, help="so many hosts, which are lost in place of ranks")
    parser.add_argument("--lease", type=float, default=2, help="of lockstep run --elastic-lease")
    parser.add_argument("--evictions", action="store_true", help="count hosts that are taken for lost under load")
    parser.add_argument("--busy", type=int, default=4, help="processes for each core beside it")
    parser.add_argument("--lost-ranks", type=int, help="measure the time from so many lost ranks to going on")
    parser.add_argument("--limits", action="store_true", help="fail where it is above what is promised")
    parser.add_argument("--keep", action="store_true", help="measure what keeping the state costs in each step")
    options = parser.parse_args()
    if options.keep:
        return measure_keep()
    if options.evictions:
        options.hosts = options.hosts or 4
    if options.hosts and options.hosts < 2:
        parser.error("--hosts: at least 2")
    options.ranks = options.ranks or (1 if options.hosts else 4)
    if options.lost_ranks:
        return measure_losses(options)
    options.seconds = options.seconds or (300 if options.evictions else 75)
    if options.hosts and os.geteuid() != 0:
        sys.exit("bench elastic: only root can make network namespaces")
    if options.hosts and not UCX_MODULE.exists():
        sys.exit(f"bench elastic: there is no {UCX_MODULE}: built without libucx-dev")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench elastic: ended by SIGTERM"))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = None
        if options.hosts:
            hosts = Hosts(options.hosts, "10gbit", folder)
            stack.callback(hosts.remove)
        (measure_evictions if options.evictions else measure_trainings)(options, hosts, Path(folder))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        modes = {"by_hand": go_on_by_hand, "run_elastic": go_on_elastic}
        modes[sys.argv[2]](*sys.argv[3:]) if sys.argv[2] in modes else train(*sys.argv[2:])
    else:
        main()
