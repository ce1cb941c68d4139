"""Trainings that go on after ranks were lost: lockstep.nn.run_elastic under `lockstep run --elastic`."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
from conftest import difference, elastic, elastic_nodes
from in_ranks import FURTHER_REPLACEMENTS
from ranks import on_ranks, raises, wait_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.nn  # noqa: E402
from lockstep import _objects  # noqa: E402
from lockstep._elastic_state import Regroup  # noqa: E402

PLACE = int(os.environ.get("RANK", "0"))
IS_REPLACEMENT = os.environ.get("LOCKSTEP_SEGMENT", "").endswith(":next")


class Trainer:
    """Trains a network with batch normalisation on random samples, whose numbers depend on every sample of every step.

    It calls end(trainer, point) where a rank may end.
    """

    def __init__(self, end=None, **options):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.data = TensorDataset(torch.randn(90, 6, dtype=torch.float64), torch.randn(90, 2, dtype=torch.float64))
        torch.manual_seed(2 + PLACE)  # the parameters of rank 0 count
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.counts = {"steps": 0}
        self.end = end
        self.options = options
        self.make_state()

    def make_state(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        self.keep([self.model, self.optimizer, self.schedule, self.counts])

    def keep(self, parts):
        self.state = ls.nn.ElasticState(parts, **self.options)
        self.sampler = ls.nn.ElasticBatchSampler(self.data, 20, self.state, drop_last=True)

    def train(self, n_steps):
        ddp = DistributedDataParallel(self.model)
        point = (lambda name: self.end(self, name)) if self.end else (lambda name: None)
        with ls.nn.SyncBatchNormScope():
            while self.state.step < n_steps:
                for inputs, targets in DataLoader(self.data, batch_sampler=self.sampler):
                    point("forward")
                    loss = mse_loss(ddp(inputs), targets)
                    point("backward")
                    self.optimizer.zero_grad()
                    (loss * self.state.scale(len(targets))).backward()
                    point("optimizer")
                    self.optimizer.step()
                    self.schedule.step()
                    self.counts["steps"] += 1
                    point("done")
                    try:
                        self.state.step_done()
                    except Exception as error:  # not of a replacement that waits
                        assert isinstance(error, ls.Error), error
                        raise
                    if self.state.step == n_steps:
                        break

    def run(self, n_steps, train=None):
        ls.nn.run_elastic(self.state, train or (lambda: self.train(n_steps)))
        self.save()

    def save(self):
        values = self.model.state_dict()
        digest = sum(p.sum().item() for p in values.values())
        steps = f"step {self.state.step}, {digest!r}, {self.counts['steps']}, {self.schedule.last_epoch}"
        print(f"rank {ls.get_rank()} of {ls.get_world_size()}: {steps}")
        if ls.is_main_process():
            torch.save(values, "parameters")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dies(place, step, point):
    """For Trainer: the first process of a place ends there."""

    def end(trainer, at):
        if not IS_REPLACEMENT and (PLACE, trainer.state.step, at) == (place, step, point):
            die()

    return end


def wait_for_replacements(n_ranks):
    while ls.get_world_size() < n_ranks and not ls.has_waiting_replacements():
        time.sleep(0.01)


def on_elastic_ranks(n, limits, **options):
    return on_ranks(n, launcher=elastic(n, limits), init=None, **options)


@pytest.fixture
def train(run_ranks, tmp_path):
    """train(n, body, limits): what the ranks print, and the parameters after it."""

    def run(n, body, limits=None, launcher=None, **options):
        launcher = elastic(n, limits) if limits else launcher
        printed = run_ranks(n, body, launcher=launcher, init=None, shares=False, **options)
        path = tmp_path / "parameters"
        parameters = torch.load(path) if path.exists() else {}
        path.unlink(missing_ok=True)
        return printed, parameters

    return run


def train_alone(n_steps):
    Trainer().run(n_steps)


results_alone = {}


@pytest.fixture
def assert_as_alone(train):
    """assert_as_alone(parameters, n_steps): they are those of one rank that nothing happens to."""

    def check(parameters, n_steps):
        if n_steps not in results_alone:
            _, results_alone[n_steps] = train(1, train_alone, n_steps=n_steps)
        assert difference(results_alone[n_steps], parameters) < 1e-9

    return check


def train_over_kills():
    ends = {1: (5, "forward"), 2: (9, "done"), 0: (14, "backward"), 3: (19, "optimizer")}

    def end(trainer, point):
        if not IS_REPLACEMENT and (trainer.state.step, point) == ends.get(PLACE):
            assert ls.get_world_size() == 4
            die()
        # The replacement of the last one is there before the next one ends.
        if point == "forward" and trainer.state.step in (8, 13, 18):
            wait_for_replacements(4)

    Trainer(end).run(25)


def test_training_over_ranks_that_are_killed_and_replaced_is_that_of_one(train, assert_as_alone):
    printed, killed = train(4, train_over_kills, "1")
    assert_as_alone(killed, 25)
    said = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith("rank ") and ": step " in line]
    assert len(said) >= 1 and len(set(said)) == 1, printed
    assert said[0].startswith("step 25, ") and said[0].endswith(", 25, 25"), said
    assert printed.count("was killed by SIGKILL") == 4, printed


def keep_drawing(alike):
    trainer = Trainer(lambda trainer, at: (dies(1, 5, "forward")(trainer, at), trainer.state.step == 8 and wait_for_replacements(2)))
    torch.manual_seed(1)

    def train():
        if trainer.state.step == 0:
            torch.manual_seed(7 if alike else 100 + PLACE)
        trainer.train(12)
        print(f"drawn {torch.rand(1).item()}")

    trainer.run(12, train)


@pytest.mark.parametrize("alike", [True, False])
def test_the_replacement_draws_as_the_only_rank_left_if_the_lost_one_did(train, alike):
    printed, _ = train(2, keep_drawing, "1", alike=alike)
    drawn = [line for line in printed.splitlines() if "drawn " in line]
    assert len(drawn) == 2 and len({line.split("drawn ")[1] for line in drawn}) == (1 if alike else 2), printed


def draw_after_a_file():
    trainer = Trainer(save="training.state", save_every=4)
    torch.manual_seed(1)

    def train():
        if trainer.state.step == 0:
            torch.manual_seed(100 + PLACE)
        trainer.train(6)
        print(f"drawn {torch.rand(1).item()}")

    trainer.run(6, train)


@pytest.mark.parametrize("limits", ["2", None])
def test_ranks_that_resume_draw_as_one_only_if_they_did(train, limits):
    drawn = []
    for _ in range(2):
        printed, _ = train(2, draw_after_a_file, limits)
        drawn.append([line.split("drawn ")[1] for line in printed.splitlines() if "drawn " in line])
    torch.manual_seed(1)
    assert len(set(drawn[0])) == 2 and drawn[1] == [str(torch.rand(1).item())] * 2, drawn


def train_over_a_lost_rank_and_a_lost_host():
    def end(trainer, point):
        here = (trainer.state.step, point)
        if here == (5, "backward") and PLACE == 1 and not IS_REPLACEMENT:
            die()
        if point == "forward" and trainer.state.step == 8:
            wait_for_replacements(6)
        if here == (12, "backward") and PLACE == 3:
            os.kill(os.getppid(), signal.SIGKILL)  # `lockstep run`, whose guard kills the ranks of its node
            signal.pause()

    Trainer(end).run(20)


def test_training_over_hosts_that_are_lost_is_that_of_one(train, assert_as_alone):
    printed, parameters = train(6, train_over_a_lost_rank_and_a_lost_host, launcher=elastic_nodes(3, 2, "2"))
    assert_as_alone(parameters, 20)
    assert "node 1 (" in printed and "is lost" in printed, printed
    assert printed.count(" of 4: step 20, ") == 4, printed


@on_ranks(2, init=None, code=128 + 9, says=["PeerLost", "rank 1 died"])
def test_without_elastic_a_loss_is_the_end():
    Trainer(dies(1, 3, "forward")).run(5)


def change_before_the_last_operation(snapshot):
    def end(trainer, point):
        if point == "done":  # the step changes parameters before its last operation
            if PLACE == 2 and trainer.state.step == 4:
                die()
            ls.barrier()

    Trainer(end, snapshot=snapshot).run(8)


HAS_CHANGED = "cannot repeat step 4, which was not complete: parameters of the state have changed already"


def test_a_step_that_has_changed_parameters_needs_a_snapshot(train, assert_as_alone):
    train(3, change_before_the_last_operation, "1:2", snapshot=False, code=1, says=HAS_CHANGED)
    _, kept = train(3, change_before_the_last_operation, "1:2", snapshot=True)
    assert_as_alone(kept, 8)


def end_when_the_group_is_made():
    n_stores = 0
    broadcast = _objects.broadcast_object_list

    def broadcast_part(part, *arguments, **options):
        nonlocal n_stores
        broadcast(part, *arguments, **options)
        if isinstance(part[0], str) and PLACE == 0:
            n_stores += 1
            if n_stores == 2:
                die()

    _objects.broadcast_object_list = broadcast_part
    Trainer(dies(2, 3, "forward")).run(8)


def test_a_kill_while_the_default_group_is_made_anew(train, assert_as_alone):
    """Rank 0 ends when the others know the part of the store that is theirs, and before they use it."""
    printed, killed = train(3, end_when_the_group_is_made, "1:1")
    assert printed.count("was killed by SIGKILL") == 2, printed
    assert_as_alone(killed, 8)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.register_buffer("n", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.full((), 1.0 + PLACE, dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.n = self.n + 1
        return self.layer(x) * self.scale / self.n


def count_in_forward(is_killed):
    trainer = Trainer()
    trainer.model = model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer.keep([model, optimizer, schedule])
    state = trainer.state

    def train():
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        while state.step < 8:
            inputs, targets = trainer.data[trainer.sampler.batch(state.step)]
            schedule.step()
            loss = mse_loss(ddp(inputs), targets) * state.scale(len(targets))
            if is_killed and PLACE == 2 and state.step == 4:
                die()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step_done()
        assert model.n == 8 and model.scale == 1 and schedule.last_epoch == 8, (model.n, model.scale, schedule.last_epoch)
        assert abs(optimizer.param_groups[0]["lr"] - 0.05 * 0.9**8) < 1e-15

    trainer.run(8, train)


def test_what_a_repeated_step_begins_with(train):
    """A buffer that forward assigns, a rate that is changed before the last operation, an optimizer that fails half way."""
    _, killed = train(3, count_in_forward, "1:2", is_killed=True)
    _, alone = train(1, count_in_forward, is_killed=False)
    assert difference(killed, alone) < 1e-9


@on_elastic_ranks(3, "1:2", code=1, says="cannot repeat step 2, which was not complete")
def test_an_optimizer_that_fails_after_it_has_changed_parameters():
    trainer = Trainer()
    trainer.model = model = nn.Linear(6, 2).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    trainer.keep([model, optimizer])
    state = trainer.state

    def train():
        ddp = DistributedDataParallel(model)
        while state.step < 4:
            inputs, targets = trainer.data[trainer.sampler.batch(state.step)]
            n_calls = 0

            def closure():
                nonlocal n_calls
                n_calls += 1
                if PLACE == 2 and state.step == 2 and n_calls == 3:
                    die()
                optimizer.zero_grad()
                loss = mse_loss(ddp(inputs), targets)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
            state.step_done()

    ls.nn.run_elastic(state, train)


def lose_the_state_while_it_is_shared(taken):
    n_gathers = 0
    gather = _objects.all_gather_object
    dies_first = dies(1, 4, "forward")

    def end(trainer, point):
        dies_first(trainer, point)
        if point == "forward" and trainer.state.step == 5:
            wait_for_replacements(2)

    def gather_or_die(*arguments, **options):
        nonlocal n_gathers
        if PLACE == 0 and state.step >= 5 and ls.get_world_size() == 2:
            n_gathers += 1  # of who has joined, the steps, who has loaded
            if n_gathers == (3 if taken else 2):
                if taken:
                    wait_for("loaded")
                die()
        return gather(*arguments, **options)

    trainer = Trainer(end)
    state = trainer.state
    keep = state._keep

    def keep_and_tell():
        keep()
        if IS_REPLACEMENT and state._has_state:
            Path("loaded").touch()

    _objects.all_gather_object = gather_or_die
    state._keep = keep_and_tell
    trainer.run(8)


def test_the_last_rank_that_has_the_state_is_lost_while_it_shares_it(train, assert_as_alone):
    """A replacement that has taken it goes on; where none has, the training does not begin anew in silence."""
    _, parameters = train(2, lose_the_state_while_it_is_shared, "1:2", taken=True)
    assert_as_alone(parameters, 8)
    lost = "all ranks that had the state are lost; restart from a checkpoint"
    train(2, lose_the_state_while_it_is_shared, "1:2", taken=False, code=1, says=lost)


@pytest.mark.parametrize("place", [0, 1])
@on_elastic_ranks(3, "1:2", returned=2, says="did not call regroup() in time")
def test_a_stopped_rank_while_groups_are_made(place):
    """The others notice at the limit, and go on."""
    state = Trainer().state

    def train():
        if PLACE == place and not IS_REPLACEMENT:
            os.kill(os.getpid(), signal.SIGSTOP)
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=group)
        state.step_done()

    ls.nn.run_elastic(state, train, timeout=8)  # a busy machine keeps a rank from it for seconds
    assert ls.get_world_size() == 2


@on_elastic_ranks(2, "1", code=1, says="3 generations in a row ended before they completed a step")
def test_a_rank_that_is_later_than_the_limit_in_every_step_ends_the_job():
    state = Trainer().state

    def train():
        while True:
            if PLACE == 1:
                time.sleep(1.5)
            state.step_done()

    ls.nn.run_elastic(state, train, timeout=1)


@on_elastic_ranks(2, "2", code=1, says="PeerLost: a group of an earlier world")
def test_an_error_of_each_attempt_without_a_loss_ends_the_training():
    def train():
        raise ls.PeerLost("a group of an earlier world")

    ls.nn.run_elastic(Trainer().state, train)


def raise_after_generations():
    n_calls = 0

    def train():
        nonlocal n_calls
        n_calls += 1
        ls.step_done()
        if n_calls < 5:
            raise Regroup
        if PLACE == 1:
            FURTHER_REPLACEMENTS.write_text("3")
            raise KeyError("mine")
        ls.barrier()

    ls.nn.run_elastic(Trainer().state, train)


def test_exceptions_are_prefixed_once_after_many_generations(run_ranks):
    printed = run_ranks(2, raise_after_generations, launcher=elastic(2, "1:1"), init=None)
    assert "]: Traceback" in printed and "]: [rank" not in printed, printed


@on_elastic_ranks(2, "2", code=1, says="a replacement begins the program anew, so a program makes one call")
def test_a_second_call_of_run_elastic():
    if IS_REPLACEMENT:
        FURTHER_REPLACEMENTS.write_text("1")
    state = Trainer().state
    ls.nn.run_elastic(state, lambda: None)
    dist.destroy_process_group()
    ls.destroy_dist()

    def train():
        ls.step_done()
        if PLACE == 1 and not IS_REPLACEMENT:
            die()
        ls.barrier()

    ls.nn.run_elastic(state, train)


def train_with_dropout(is_killed):
    def end(trainer, point):
        if PLACE == 2 and trainer.state.step == 4 and point == ("backward" if is_killed else "forward"):
            die() if is_killed else os._exit(0)

    trainer = Trainer(end, seed=5)
    trainer.model.append(nn.Dropout(0.5))
    trainer.make_state()
    trainer.run(8)


def test_seeds_make_runs_with_the_same_ranks_the_same(train):
    """With dropout: ranks that are killed in a step, and ranks that leave before it."""
    _, killed = train(3, train_with_dropout, "1:2", is_killed=True)
    _, left = train(3, train_with_dropout, "1:2", is_killed=False)
    assert difference(killed, left) == 0


@on_elastic_ranks(4, "1:3", returned=3)
def test_groups_that_the_function_makes():
    state = Trainer().state

    def train():
        group = dist.new_group([0, 1])
        assert dist.get_world_size() == ls.get_world_size() and dist.get_backend() == "lockstep"
        while state.step < 6:
            if PLACE == 3 and state.step == 3:
                die()
            x = torch.full((3,), state.step + 1.0)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            assert x[0] == (state.step + 1) * dist.get_world_size()
            if dist.get_rank() < 2:
                dist.all_reduce(x, group=group)
            state.step_done()

    ls.nn.run_elastic(state, train)
    assert ls.get_world_size() == 3
    with raises(ls.UsageError, "has a default group; run_elastic makes it itself"):
        ls.nn.run_elastic(state, train)


@pytest.mark.parametrize("waits_in", ["all_reduce", "group", "recv", "store", "new_group", "connecting"])
def test_waits_between_hosts_end_with_the_generation(run_ranks, waits_in):
    """Of those that wait for the lost rank, and of those that wait for one that waits for it."""
    run_ranks(4, wait_between_hosts, launcher=elastic_nodes(2, 2, "3:3"), init=None, returned=3, waits_in=waits_in)


def die_in_gloo():
    """When the others know the address of its Gloo, to which they then connect."""
    gloo = dist.ProcessGroupGloo

    class Dies(dist.Store):
        def __init__(self, store):
            super().__init__()
            self.store = store

        def set(self, key, value):
            self.store.set(key, value)
            die()

        def get(self, key):
            return self.store.get(key)

        def wait(self, *arguments):
            self.store.wait(*arguments)

    dist.ProcessGroupGloo = lambda store, *arguments, **options: gloo(Dies(store), *arguments, **options)


def wait_between_hosts(waits_in):
    state = Trainer().state

    def train():
        last = dist.get_world_size() - 1
        if PLACE == 3 and waits_in == "new_group":
            die()
        if PLACE == 3 and waits_in == "connecting":
            die_in_gloo()
        pair = dist.new_group([0, last])
        x = torch.ones(3)
        while state.step < 4:
            if PLACE == 3 and state.step == 2:
                die()
            if waits_in == "group" and dist.get_rank() in (0, last):
                dist.all_reduce(x, group=pair)
            elif waits_in == "recv" and dist.get_rank() == last:
                dist.send(x, 0)
            elif waits_in == "recv" and dist.get_rank() == 0:
                dist.recv(x, last)
            elif waits_in == "store":
                store = dist.distributed_c10d._get_default_store()
                store.set(f"{state.step} {dist.get_rank()}", "here")
                store.wait([f"{state.step} {rank}" for rank in range(last + 1)])
            if waits_in != "store":
                dist.all_reduce(x)
            state.step_done()

    ls.nn.run_elastic(state, train)
    assert ls.get_world_size() == 3


@on_elastic_ranks(2, "2", code=3)
def test_other_exceptions_leave():
    def train():
        if PLACE == 1:
            FURTHER_REPLACEMENTS.write_text("3")
            raise KeyError("mine")
        ls.barrier()

    with raises(KeyError, "mine") if PLACE == 1 else raises(ls.EngineError, "ends the job"):
        ls.nn.run_elastic(Trainer().state, train)
    sys.exit(3)


# --- every row of what a step reads, killed at every kind of point ----------------------------------

KILLS = {
    "plain": "1.0@forward#3,2.0@in backward#10",
    "gradients": "1.0@in forward#6,0.0@after done#9",
    "flags": "1.0@validation#2,0.0@epoch end#4",
    "accumulate": "1.0@micro#4,0.0@done#10",
    "gan": "1.0@between#5,2.0@optimizer#11",
    "scaler": "1.0@forward#5,0.0@share#2",
    "random": "1.0@backward#5,1.1@load#1",
    "seeded": "2.0@optimizer#6,1.0@done#12",
    "objects": "1.0@forward#4,2.0@regroup#1",
    "by hand": "1.0@epoch end#3,2.0@end#1",
}


@pytest.mark.parametrize("program", KILLS)
def test_nothing_is_forgotten(elastic_program, program):
    alone, _, _ = elastic_program(program)
    killed, kills, printed = elastic_program(program, KILLS[program])
    assert len(kills) == 2, printed
    assert difference(alone, killed) < 1e-9, (alone["log"], killed["log"], kills)


def replace_by_what_does_not_fit():
    dies_first = dies(1, 3, "backward")

    def end(trainer, point):
        dies_first(trainer, point)
        if point == "forward" and trainer.state.step >= 9:
            wait_for_replacements(3)

    trainer = Trainer(end)
    if IS_REPLACEMENT and not os.path.exists("fits"):
        with open("rejected", "a") as file:
            file.write("x")
        if os.path.getsize("rejected") == 1:
            trainer.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2)).double()
        else:
            trainer.model = trainer.model.float()
            Path("fits").touch()
        trainer.make_state()
    trainer.run(12)


def test_a_replacement_that_does_not_fit_harms_nobody_else(train, assert_as_alone):
    """A network of other sizes, and one of another type, which torch would convert without a word."""
    cannot = "cannot take the state of rank 0: "
    wrong = ["RuntimeError: Error(s) in loading state_dict", "TypeError: 0.weight is torch.float32 here, and torch.float64 there"]
    printed, killed = train(3, replace_by_what_does_not_fit, "1", says=[cannot + each for each in wrong])
    assert printed.count("of 3: step 12, ") == 3, printed
    assert_as_alone(killed, 12)


def lose_all_ranks_once():
    def end(trainer, point):
        lost = Path(f"lost-{PLACE}")
        if point == "backward" and trainer.state.step == 9 and not lost.exists():
            lost.touch()
            ls.barrier()
            die()

    Trainer(end, save="training.state", save_every=4).run(12)


def test_the_same_command_resumes_when_all_ranks_were_lost(train, assert_as_alone):
    train(2, lose_all_ranks_once, "1", code=128 + 9, says="no rank is left to go on from")
    _, resumed = train(2, lose_all_ranks_once, "1", says=": step 12, ")
    # It is complete, and another command finds that.
    _, again = train(1, lose_all_ranks_once)
    assert difference(resumed, again) == 0
    assert_as_alone(resumed, 12)


def lose_ranks_before_the_first_step():
    if PLACE == 1 and not IS_REPLACEMENT:
        die()
    trainer = Trainer()
    pack = trainer.state._packed

    def pack_or_die():
        if not IS_REPLACEMENT:
            die()
        return pack()

    trainer.state._packed = pack_or_die
    trainer.run(3)


def test_all_ranks_are_lost_one_after_the_other_before_the_first_step(train):
    """Nothing is lost: the replacements begin anew."""
    printed, _ = train(2, lose_ranks_before_the_first_step, "2")
    assert printed.count("of 2: step 3, ") == 2, printed


@on_elastic_ranks(2, "1", returned=2)
def test_a_rank_that_has_finished_tells_the_launcher():
    """Which then waits for it no more, whatever happens to the others: tests/cli."""
    trainer = Trainer()
    calls = []
    ls._core.finish_elastic = lambda: calls.append(trainer.state.step)
    trainer.run(3)
    assert calls == [3], calls


def keep_an_exception():
    kept = []
    trainer = Trainer(dies(2, 3, "backward"))

    def train():
        try:
            trainer.train(8)
        except Exception:
            kept.append(sys.exc_info())  # with the frames, and the DistributedDataParallel in one
            raise

    trainer.run(8, train)
    assert len(kept) == 1


def test_an_exception_that_the_program_keeps_does_not_keep_its_ddp_acting(train, assert_as_alone):
    _, killed = train(3, keep_an_exception, "1:2", returned=2)
    assert_as_alone(killed, 8)


@pytest.mark.parametrize("frozen", ["before", "before, with a closure", "after", "wrapped anew"])
@on_elastic_ranks(2, "2")
def test_a_parameter_that_is_thawed(frozen):
    """Its gradients are averaged only by a DistributedDataParallel that is made while it requires one: with losses or without."""
    trainer = Trainer()
    model, optimizer, state = trainer.model, trainer.optimizer, trainer.state
    bias = model[3].bias

    def train():
        bias.requires_grad_(state.step >= 2 or not frozen.startswith("before"))
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        for inputs, targets in DataLoader(trainer.data, batch_sampler=trainer.sampler):
            bias.requires_grad_(state.step == 2)
            if state.step == 2 and frozen == "wrapped anew":
                ddp = DistributedDataParallel(model)

            def backward():
                optimizer.zero_grad()
                loss = mse_loss(ddp(inputs), targets)  # noqa: B023
                loss.backward()
                return loss

            def step():
                if "closure" in frozen:
                    optimizer.step(backward)
                else:
                    optimizer.step()

            if "closure" not in frozen:
                backward()
            if state.step == 2 and frozen.startswith("before"):
                with raises(ls.UsageError, "parameter 0/3.bias of the state (part/name) had requires_grad=False"):
                    step()
                bias.requires_grad_(False).grad = None
            if state.step == 2 and frozen == "after":
                with warnings.catch_warnings(record=True) as noticed:
                    warnings.simplefilter("always")
                    step()
                assert "parameter 0/3.bias of the state" in str(noticed[0].message), noticed
            else:
                step()
            state.step_done()

    ls.nn.run_elastic(state, train)


def swap_an_average_in(snapshot):
    def end(trainer, point):
        if point == "forward" and trainer.state.step == 4:
            with torch.no_grad():
                trained = [p.clone() for p in trainer.model.parameters()]
                for p, other in zip(trainer.model.parameters(), average, strict=True):
                    p.copy_(other)
            if PLACE == 1:
                die()
            ls.barrier()
            with torch.no_grad():
                for p, own in zip(trainer.model.parameters(), trained, strict=True):
                    p.copy_(own)

    trainer = Trainer(end, snapshot=snapshot)
    average = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.run(8)


def test_parameters_that_the_program_changes_itself_in_a_step(train, assert_as_alone):
    """As an average that is swapped in for validation: a step in which they have changed is not repeated from there."""
    train(3, swap_an_average_in, "1:2", snapshot=False, code=1, says=HAS_CHANGED)
    _, killed = train(3, swap_an_average_in, "1:2", snapshot=True)
    assert_as_alone(killed, 8)


@on_elastic_ranks(2, "1:2", returned=1, says="rank 0 cannot give its state")
def test_a_state_that_cannot_be_given_away():
    """What pickle refuses harms the replacement, not the ranks that have it."""
    dies_first = dies(1, 2, "forward")

    def end(trainer, point):
        if trainer.state.step == 1:
            trainer.counts["what"] = type("Hidden", (), {})()
        dies_first(trainer, point)
        if trainer.state.step == 6 and not IS_REPLACEMENT:
            wait_for_replacements(2)

    Trainer(end).run(8)


@on_ranks(3, init=None, shares=False)
def test_an_empty_batch_is_refused_where_a_loader_would_make_it():
    trainer = Trainer()
    sampler = ls.nn.ElasticBatchSampler(range(22), 10, trainer.state)

    def train():
        with raises(ls.UsageError, "a step of 2 samples leaves some of 3 ranks without"):
            next(iter(sampler))
        assert [len(sampler.batch(step)) for step in (0, 2)] == [[4, 1], [3, 1], [3, 0]][ls.get_rank()]

    ls.nn.run_elastic(trainer.state, train)
