"""elastic_programs.py PROGRAM [KILLS]: trainings over run_elastic; each has another row of what a step reads.

KILLS: PLACE.N@POINT#COUNT, ...: process N of a place, from 0, kills itself when it is at the point for the COUNTth time. Or
random:SEED:N: N kills at random points. Writes "result" (rank 0) and a line for each kill to "kills". Every few steps
the ranks wait for replacements, so that these take part.
"""

import collections
import contextlib
import fcntl
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
import lockstep.nn

torch.set_num_threads(1)
N_PLACES = int(os.environ.get("WORLD_SIZE", "1"))
N_EPOCHS = 5
# Where a process may end. "between": of two optimizers; "micro": of two micro batches.
POINTS = ["forward", "in forward", "backward", "in backward", "optimizer", "between", "micro", "done", "after done", "regroup",
          "share", "load", "validation", "epoch end", "end"]  # fmt: skip


class Kills:
    """Ends this process at the points of a plan; at random ones only while another process has the state."""

    def __init__(self, plan):
        self.place = os.environ.get("RANK", "0")
        started = Path(f"started-{self.place}")
        with open(started, "a") as file:
            file.write("x")
        self.process = started.stat().st_size - 1
        self.arrivals = collections.Counter()
        self.random = None
        self.plan = plan.split(",")
        if plan.startswith("random:"):
            _, seed, n = plan.split(":")
            self.n_kills = int(n)
            self.random = random.Random(f"{seed} {self.place} {self.process}")

    def point(self, name):
        assert name in POINTS
        self.arrivals[name] += 1
        if f"{self.place}.{self.process}@{name}#{self.arrivals[name]}" in self.plan:
            self.end(name)
        # The rare points as often as those of each step.
        if self.random is not None and self.random.random() < (0.02 if POINTS.index(name) < 9 else 0.2):
            with open("lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                others = [path for path in Path().glob("has-state-*") if path.name != f"has-state-{self.place}"]
                n = len(Path("kills").read_text().splitlines()) if Path("kills").exists() else 0
                if others and n < self.n_kills:
                    self.end(name)

    def has_state(self):
        Path(f"has-state-{self.place}").touch()

    def end(self, name):
        Path(f"has-state-{self.place}").unlink(missing_ok=True)
        with open("kills", "a") as file:
            file.write(f"{self.place}.{self.process} {name} at step {state.step}\n")
        os.kill(os.getpid(), signal.SIGKILL)


class Program:
    """SGD with momentum, batch normalisation, a schedule of epochs, and a log."""

    options = {}
    micro_batches = 1
    ddp_options = {}
    set_to_none = True

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.optimizer = self.make_optimizer()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.log = []
        self.parts = [self.model, self.optimizer, self.schedule, self.log]

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)

    def wrap(self):
        self.ddp = DistributedDataParallel(self.model, **self.ddp_options)

    def loss(self, inputs, targets):
        outputs = self.ddp(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: point("in backward"))
        return mse_loss(outputs, targets) * state.scale(len(targets))

    def step(self, inputs, targets):
        point("forward")
        loss = self.loss(inputs, targets)
        self.model.zero_grad(set_to_none=self.set_to_none)
        point("backward")
        loss.backward()
        self.change()
        point("done")
        state.step_done()
        point("after done")

    def change(self):
        point("optimizer")
        self.optimizer.step()

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            loss = mse_loss(self.model(data.tensors[0]), data.tensors[1])
        point("validation")
        torch.distributed.all_reduce(loss)
        self.model.train()
        return loss.item() / torch.distributed.get_world_size()

    def end_of_epoch(self, epoch):
        self.log.append((epoch, state.step, self.validate()))
        self.schedule.step()
        point("epoch end")

    def result(self):
        return self.model.state_dict()


class Gradients(Program):
    """Adam moves a parameter whose gradient is zero, and not one that has none: here those of a head that is used by and by."""

    ddp_options = {"find_unused_parameters": True}
    set_to_none = False

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

        def forward(self, x):
            return self.heads[state.step // 3 % 2](x)  # the third one never

    def __init__(self):
        super().__init__()
        self.model = self.Heads().double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.parts = [self.model, self.optimizer, self.schedule, self.log]


class Flags(Program):
    """Batch normalisation is frozen from the second epoch on, and thawed at the last; validation is in eval mode."""

    ddp_options = {"find_unused_parameters": True}

    def end_of_epoch(self, epoch):
        super().end_of_epoch(epoch)
        frozen = epoch < N_EPOCHS - 2
        self.model[1].train(not frozen)
        self.model[3].bias.requires_grad_(not frozen)
        self.wrap()  # one that was made in a frozen epoch would not average what is thawed


class Accumulate(Program):
    micro_batches = 2

    def step(self, inputs, targets):
        with state.micro_batch(self.ddp) as last:
            point("micro")
            loss = self.loss(inputs, targets)
            point("backward")
            loss.backward()
        if last:
            self.change()
            self.optimizer.zero_grad()
            point("done")
            state.step_done()
            point("after done")


class Gan(Program):
    """Two optimizers that change parameters in turn, in one step."""

    options = {"snapshot": True}

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer_of_critic = torch.optim.Adam(self.critic.parameters(), 0.01)
        self.parts += [self.critic, self.optimizer_of_critic]

    def wrap(self):
        super().wrap()
        self.ddp_of_critic = DistributedDataParallel(self.critic)

    def step(self, inputs, targets):
        point("forward")
        factor = state.scale(len(targets))
        made = self.ddp(inputs)
        loss = (self.ddp_of_critic(made.detach()).square().mean() + (self.ddp_of_critic(targets) - 1).square().mean()) * factor
        self.optimizer_of_critic.zero_grad()
        loss.backward()
        self.optimizer_of_critic.step()
        point("between")
        loss = (self.ddp_of_critic(made) - 1).square().mean() * factor
        self.optimizer.zero_grad()
        point("backward")
        loss.backward()  # leaves gradients in the critic
        self.change()
        point("done")
        state.step_done()
        point("after done")

    def result(self):
        return {**self.model.state_dict(), **{f"critic.{name}": value for name, value in self.critic.state_dict().items()}}


class Scaler(Program):
    """A scaler, clipping, an average of the parameters, a schedule of schedules, and one that looks at the loss."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        schedules = [torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)]
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30))
        self.warm_up = torch.optim.lr_scheduler.SequentialLR(self.optimizer, schedules, [4])
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        self.parts = [self.model, self.optimizer, self.log, self.scaler, self.warm_up, self.plateau, self.average]

    def loss(self, inputs, targets):
        loss = super().loss(inputs, targets)
        return self.scaler.scale(loss * float("inf") if state.step == 7 else loss)  # a step that the scaler leaves out

    def change(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        point("optimizer")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.warm_up.step()
        self.average.update_parameters(self.model)

    def end_of_epoch(self, epoch):
        self.log.append((epoch, state.step, self.validate(), self.scaler.get_scale()))
        self.plateau.step(1.0)
        point("epoch end")

    def result(self):
        return self.average.state_dict()


class Random(Program):
    """All ranks draw the same numbers, each from its own generators."""

    def loss(self, inputs, targets):
        drawn = torch.rand(1).item() + random.random() + np.random.rand() + abs(np.random.randn())
        return super().loss(inputs, targets) * drawn


class Seeded(Random):
    options = {"seed": 3}

    def loss(self, inputs, targets):
        # The seeds are those of the rank.
        drawn = torch.rand(1, dtype=torch.float64)
        torch.distributed.broadcast(drawn, 0)
        return Program.loss(self, inputs, targets) * drawn.item()


class Objects(Program):
    """Buffers that are assigned, not persistent, or None; extra state; an object; options that a step changes."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(6), persistent=False)
            self.register_buffer("nothing", None)
            self.extra = 0

        def get_extra_state(self):
            return {"extra": self.extra}

        def set_extra_state(self, state):
            self.extra = state["extra"]

        def forward(self, x):
            if self.training:
                self.n = self.n + 1
                self.mean += 0.1 * whole_mean[state.step % 4]
                self.extra += 1
            return self.layer(x - self.mean) / (self.n + self.extra)

    class Count:
        n = 0

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, values):
            self.n = values["n"]

    def __init__(self):
        super().__init__()
        self.model = self.Counting().double()
        self.optimizer = self.make_optimizer()
        self.count = self.Count()
        self.numbers = {"factors": [1.0]}
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.parts = [self.model, self.optimizer, self.schedule, self.log, self.count, self.numbers]

    def loss(self, inputs, targets):
        self.count.n += 1
        self.numbers["factors"][0] *= 1.01
        group = self.optimizer.param_groups[0]
        group["weight_decay"] += 0.001
        group["own"] = group.get("own", 0) + 1
        return super().loss(inputs, targets) * self.numbers["factors"][0] / (self.count.n + group["own"])


class ByHand(Program):
    def __init__(self):
        super().__init__()
        self.rate = [0.1]
        self.options = {"by_hand": [self.model]}
        self.parts = [self.model, self.log, self.rate]

    def change(self):
        point("optimizer")
        for parameter in self.model.parameters():
            parameter.data -= self.rate[0] * parameter.grad
        self.rate[0] *= 0.95

    def end_of_epoch(self, epoch):
        self.log.append((epoch, state.step, self.validate()))
        point("epoch end")


PROGRAMS = {"plain": Program, "gradients": Gradients, "flags": Flags, "accumulate": Accumulate, "gan": Gan, "scaler": Scaler,
            "random": Random, "seeded": Seeded, "objects": Objects, "by hand": ByHand}  # fmt: skip


def watch_the_inside():
    """The points that are in lockstep."""
    from lockstep import _elastic_state, _world

    regroup, packed, finish = _world.regroup, state._packed, _elastic_state.ElasticState._begin_step

    def regroup_or_end(*arguments):
        point("regroup")
        return regroup(*arguments)

    def share_or_end():
        point("share")
        return packed()

    def load_or_end(values, load=state._parts[1].load):
        point("load")
        load(values)

    def begin_step(self):
        kills.has_state()
        finish(self)

    program.model.register_forward_pre_hook(lambda *_: point("in forward"))
    _world.regroup = regroup_or_end
    state._packed = share_or_end
    state._parts[1].load = load_or_end
    _elastic_state.ElasticState._begin_step = begin_step


def train():
    program.wrap()
    with lockstep.nn.SyncBatchNormScope() if lockstep.get_world_size() > 1 else contextlib.nullcontext():
        for epoch in state.epochs(sampler, N_EPOCHS):
            for inputs, targets in DataLoader(data, batch_sampler=sampler):
                while state.step in (8, 15) and lockstep.get_world_size() < N_PLACES and not lockstep.has_waiting_replacements():
                    time.sleep(0.01)
                program.step(inputs, targets)
            program.end_of_epoch(epoch)
        point("end")


kills = Kills(sys.argv[2] if len(sys.argv) > 2 else "")
point = kills.point
torch.manual_seed(1)
random.seed(1)
np.random.seed(1)
data = TensorDataset(torch.randn(96, 6, dtype=torch.float64), torch.randn(96, 2, dtype=torch.float64))
whole_mean = torch.randn(4, 6, dtype=torch.float64)
program = PROGRAMS[sys.argv[1]]()
state = lockstep.nn.ElasticState(program.parts, **program.options)
sampler = lockstep.nn.ElasticBatchSampler(data, 24, state, micro_batches=program.micro_batches)
watch_the_inside()
lockstep.nn.run_elastic(state, train)
assert (state.step, state.epoch_ends) == (20, N_EPOCHS), (state.step, state.epoch_ends)
if lockstep.is_main_process():
    torch.save({"parameters": program.result(), "log": program.log}, "result")
