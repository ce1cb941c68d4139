"""Ranks that go on after one was lost, under `lockstep run --elastic`."""

import pytest
from conftest import COMMAND, difference

import lockstep


def elastic(n, limits, *options):
    """The command that starts n ranks."""
    return [COMMAND, "run", "-n", str(n), "--elastic", limits, *options, "--"]


def test_survivors_of_a_kill_regroup(run_ranks):
    printed = run_ranks(
        3,
        """
        assert ls.is_elastic() and not ls.replacements_wait()
        old = ls.default_group().duplicate()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(ls.PeerLost, "rank 1 was killed by signal 9 (SIGKILL)"):
            while True:
                ls.barrier()
                ls.step_done()
        world = ls.regroup(timeout=30)
        assert world == (rank // 2, 2, 1, [(1, 0, "was killed by signal 9 (SIGKILL)")], []), world
        assert world.lost[0].why.startswith("was killed") and ls.get_dist_info() == (world.rank, world.size)
        x = np.full(1000, world.rank + 1.0)
        ls.all_reduce(x)
        assert (x == 3).all()
        with raises(ls.PeerLost, "generation 0 of the world is over"):
            old.duplicate()
        print("went on")
        """,
        launcher=elastic(3, "1:2"),
    )
    assert printed.count("went on") == 2, printed


def test_a_replacement_joins(run_ranks):
    printed = run_ranks(
        2,
        """
        is_replacement = os.environ["LOCKSTEP_SEGMENT"].endswith(":next")
        if not is_replacement:
            if rank == 1:
                raise ValueError("rank 1 is at its end")
            with raises(ls.PeerFailed, "rank 1 is at its end"):
                ls.barrier()
            alone = ls.regroup()
            assert alone.size == 1 and "ValueError: rank 1 is at its end" in alone.lost[0].why, alone
            ls.step_done()
            while not ls.replacements_wait():
                time.sleep(0.01)
            assert ls.regroup() == (0, 2, 2, [], [1])
        assert ls.get_world_size() == 2
        numbers = ls.all_gather_object(is_replacement)
        assert numbers == [False, True]
        print("together")
        """,
        launcher=elastic(2, "1"),
    )
    assert printed.count("together") == 2, printed


def test_without_elastic_it_is_refused(run_ranks):
    run_ranks(
        2,
        """
        assert not ls.is_elastic() and not ls.replacements_wait()
        ls.step_done()
        with raises(ls.UsageError, "lockstep run -n N --elastic MIN", "program.py:"):
            ls.regroup()
        with raises(ls.UsageError, "timeout is 'soon'"):
            ls.regroup("soon")
        ls.barrier()
        """,
    )
    with pytest.raises(lockstep.UsageError):
        lockstep.regroup()


# --- with torch -----------------------------------------------------------------------------------

# What the programs below train: a network with batch normalisation on random samples, whose numbers depend on every
# sample of every step. `end(point)` is called where a rank may end.
TRAINING = """
import io, os, random, signal, sys, time, torch
import numpy as np
import lockstep as ls, lockstep.nn
from ranks import raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
place = int(os.environ.get("RANK", "0"))
is_replacement = os.environ.get("LOCKSTEP_SEGMENT", "").endswith(":next")
torch.manual_seed(1)
data = TensorDataset(torch.randn(90, 6, dtype=torch.float64), torch.randn(90, 2, dtype=torch.float64))
torch.manual_seed(2 + place)  # the parameters of rank 0 count
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
counts = {"steps": 0}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def end(point):
    pass

def save(path):
    digest = sum(p.sum().item() for p in model.state_dict().values())
    print(f"rank {ls.get_rank()} of {ls.get_world_size()}: step {state.step}, {digest!r}, {counts['steps']}, {schedule.last_epoch}")
    if ls.is_main_process():
        torch.save(model.state_dict(), path)

def make_train(n_steps):
    def train():
        ddp = DistributedDataParallel(model)
        with lockstep.nn.SyncBatchNormScope():
            while state.step < n_steps:
                for inputs, targets in DataLoader(data, batch_sampler=sampler):
                    end("forward")
                    loss = nn.functional.mse_loss(ddp(inputs), targets)
                    end("backward")
                    optimizer.zero_grad()
                    (loss * state.scale(len(targets))).backward()
                    end("optimizer")
                    optimizer.step()
                    schedule.step()
                    counts["steps"] += 1
                    end("done")
                    try:
                        state.step_done()
                    except Exception as error:  # not of a replacement that waits
                        assert isinstance(error, ls.Error), error
                        raise
                    if state.step == n_steps:
                        break
    return train

state = lockstep.nn.ElasticState([model, optimizer, schedule, counts])
sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)
"""


@pytest.fixture
def train(run_ranks, tmp_path):
    """train(n, program, launcher): the lines that the ranks print, and the parameters after it."""
    torch = pytest.importorskip("torch")

    def run(n, program, launcher=None, code=0):
        printed = run_ranks(n, program, prelude=TRAINING, launcher=launcher, code=code)
        path = tmp_path / "parameters"
        parameters = torch.load(path) if path.exists() else {}
        path.unlink(missing_ok=True)
        return printed, parameters

    return run


def largest_difference(a, b):
    assert a.keys() == b.keys() and a
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


ALONE = """
lockstep.nn.run_elastic(state, make_train(25))
save("parameters")
"""

KILLED = """
ends = {1: (5, "forward"), 2: (9, "done"), 0: (14, "backward"), 3: (19, "optimizer")}

def end(point):
    if not is_replacement and (state.step, point) == ends.get(place):
        assert ls.get_world_size() == 4
        die()
    # The replacement of the last one is there before the next one ends.
    while point == "forward" and state.step in (8, 13, 18) and ls.get_world_size() < 4 and not ls.replacements_wait():
        time.sleep(0.01)

lockstep.nn.run_elastic(state, make_train(25))
save("parameters")
"""


def test_training_over_ranks_that_are_killed_and_replaced_is_that_of_one(train):
    _, alone = train(1, ALONE)
    printed, killed = train(4, KILLED, elastic(4, "1"))
    assert largest_difference(alone, killed) < 1e-9
    said = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith("rank ") and ": step " in line]
    assert len(said) >= 1 and len(set(said)) == 1, printed
    assert said[0].startswith("step 25, ") and said[0].endswith(", 25, 25"), said
    assert printed.count("was killed by SIGKILL") == 4, printed


def test_without_elastic_a_loss_is_the_end(train):
    printed, _ = train(
        2,
        """
        def end(point):
            if place == 1 and state.step == 3 and point == "forward":
                die()

        lockstep.nn.run_elastic(state, make_train(5))
        """,
        code=128 + 9,
    )
    assert "PeerLost" in printed and "rank 1 died" in printed, printed


CHANGED = """
state = lockstep.nn.ElasticState([model, optimizer, schedule, counts], snapshot=SNAPSHOT)
sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

def end(point):
    if point == "done":  # the step changes parameters before its last operation
        if place == 2 and state.step == 4:
            die()
        ls.barrier()

lockstep.nn.run_elastic(state, make_train(8))
save("parameters")
"""


def test_a_step_that_has_changed_parameters_needs_a_snapshot(train):
    printed, _ = train(3, CHANGED.replace("SNAPSHOT", "False"), elastic(3, "1:2"), code=1)
    assert "cannot repeat step 4, which was not complete: parameters of the state have changed already" in printed, printed
    _, kept = train(3, CHANGED.replace("SNAPSHOT", "True"), elastic(3, "1:2"))
    _, alone = train(1, ALONE.replace("25", "8"))
    assert largest_difference(alone, kept) < 1e-9


def test_a_kill_while_the_default_group_is_made_anew(train):
    """Rank 0 ends when the others know the address of its store, and before they connect."""
    _, alone = train(1, ALONE.replace("25", "8"))
    printed, killed = train(
        3,
        """
        from lockstep import _objects
        n_stores = 0
        broadcast = _objects.broadcast_object_list

        def broadcast_address(address, *arguments):
            global n_stores
            broadcast(address, *arguments)
            if isinstance(address[0], tuple) and place == 0:
                n_stores += 1
                if n_stores == 2:
                    die()

        _objects.broadcast_object_list = broadcast_address

        def end(point):
            if place == 2 and state.step == 3 and point == "forward":
                die()

        lockstep.nn.run_elastic(state, make_train(8))
        save("parameters")
        """,
        elastic(3, "1:1"),
    )
    assert printed.count("was killed by SIGKILL") == 2, printed
    assert largest_difference(alone, killed) < 1e-9


def test_what_a_repeated_step_begins_with(train):
    """A buffer that forward assigns, a rate that is changed before the last operation, an optimizer that fails half way."""
    program = """
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2).double()
            self.register_buffer("n", torch.zeros((), dtype=torch.float64))
            self.register_buffer("scale", torch.full((), 1.0 + place, dtype=torch.float64), persistent=False)

        def forward(self, x):
            self.n = self.n + 1
            return self.layer(x) * self.scale / self.n

    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = lockstep.nn.ElasticState([model, optimizer, schedule])
    sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

    def train():
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        while state.step < 8:
            inputs, targets = data[sampler.batch(state.step)]
            schedule.step()
            loss = nn.functional.mse_loss(ddp(inputs), targets) * state.scale(len(targets))
            if KILL and place == 2 and state.step == 4:
                die()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step_done()
        assert model.n == 8 and model.scale == 1 and schedule.last_epoch == 8, (model.n, model.scale, schedule.last_epoch)
        assert abs(optimizer.param_groups[0]["lr"] - 0.05 * 0.9**8) < 1e-15

    lockstep.nn.run_elastic(state, train)
    if ls.is_main_process():
        torch.save(model.state_dict(), "parameters")
    """
    _, killed = train(3, program.replace("KILL", "True"), elastic(3, "1:2"))
    _, alone = train(1, program.replace("KILL", "False"))
    assert largest_difference(killed, alone) < 1e-9


def test_an_optimizer_that_fails_after_it_has_changed_parameters(train):
    printed, _ = train(
        3,
        """
        model = nn.Linear(6, 2).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        state = lockstep.nn.ElasticState([model, optimizer])
        sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

        def train():
            ddp = DistributedDataParallel(model)
            while state.step < 4:
                inputs, targets = data[sampler.batch(state.step)]
                n_calls = 0

                def closure():
                    nonlocal n_calls
                    n_calls += 1
                    if place == 2 and state.step == 2 and n_calls == 3:
                        die()
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(ddp(inputs), targets)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                state.step_done()

        lockstep.nn.run_elastic(state, train)
        """,
        elastic(3, "1:2"),
        code=1,
    )
    assert "cannot repeat step 2, which was not complete" in printed, printed


def test_the_last_rank_that_has_the_state_is_lost_while_it_shares_it(train):
    """A replacement that has taken it goes on; where none has, the training does not begin anew in silence."""
    for taken in True, False:
        printed, parameters = train(
            2,
            f"""
            def end(point):
                if place == 1 and not is_replacement and state.step == 4 and point == "forward":
                    die()
                while point == "forward" and state.step == 5 and ls.get_world_size() < 2 and not ls.replacements_wait():
                    time.sleep(0.01)

            n_gathers = 0
            gather = lockstep._objects.all_gather_object

            def gather_or_die(*arguments, **options):
                global n_gathers
                if place == 0 and state.step >= 5 and ls.get_world_size() == 2:
                    n_gathers += 1  # of who can join, the steps, who has loaded
                    if n_gathers == {4 if taken else 3}:
                        if {taken}:
                            while not os.path.exists("loaded"):
                                time.sleep(0.01)
                        die()
                return gather(*arguments, **options)

            lockstep._objects.all_gather_object = gather_or_die
            keep = state._keep

            def keep_and_tell():
                keep()
                if is_replacement and state._has_state:
                    open("loaded", "w").close()

            state._keep = keep_and_tell
            lockstep.nn.run_elastic(state, make_train(8))
            save("parameters")
            """,
            elastic(2, "1:2"),
            code=0 if taken else 1,
        )
        if taken:
            _, alone = train(1, ALONE.replace("25", "8"))
            assert largest_difference(parameters, alone) < 1e-9
        else:
            assert "all ranks that had the state are lost; restart from a checkpoint" in printed, printed


def test_a_stopped_rank_while_groups_are_made(train):
    """Also rank 0, which has the store: the others notice at the limit, and go on."""
    for place in 0, 1:
        printed, _ = train(
            3,
            f"""
            import torch.distributed as dist

            def train():
                if place == {place} and not is_replacement:
                    os.kill(os.getpid(), signal.SIGSTOP)
                group = dist.new_group([0, 1])
                if dist.get_rank() < 2:
                    dist.all_reduce(torch.ones(1), group=group)
                state.step_done()
                print("trained over", ls.get_world_size())

            lockstep.nn.run_elastic(state, train, timeout=2)
            """,
            elastic(3, "1:2"),
        )
        assert printed.count("trained over 2") == 2 and "did not call regroup() in time" in printed, printed


def test_a_rank_that_is_later_than_the_limit_in_every_step_ends_the_job(train):
    printed, _ = train(
        2,
        """
        def train():
            while True:
                if place == 1:
                    time.sleep(1.5)
                state.step_done()

        lockstep.nn.run_elastic(state, train, timeout=1)
        """,
        elastic(2, "1"),
        code=1,
    )
    assert "3 generations in a row ended before they completed a step" in printed, printed


def test_an_error_of_each_attempt_without_a_loss_ends_the_training(train):
    printed, _ = train(
        2,
        """
        def train():
            raise ls.PeerLost("a group of an earlier world")

        lockstep.nn.run_elastic(state, train)
        """,
        elastic(2, "2"),
        code=1,
    )
    assert "PeerLost: a group of an earlier world" in printed, printed


def test_exceptions_are_prefixed_once_after_many_generations(train):
    printed, _ = train(
        2,
        """
        from lockstep._elastic_state import Regroup
        n_calls = 0

        def train():
            global n_calls
            n_calls += 1
            ls.step_done()
            if n_calls < 5:
                raise Regroup
            if place == 1:
                raise KeyError("mine")
            ls.barrier()

        lockstep.nn.run_elastic(state, train)
        """,
        elastic(2, "1:1"),
    )
    assert "]: Traceback" in printed and "]: [rank" not in printed, printed


def test_a_second_call_of_run_elastic(train):
    printed, _ = train(
        2,
        """
        lockstep.nn.run_elastic(state, lambda: None)
        torch.distributed.destroy_process_group()
        ls.destroy_dist()

        def train():
            ls.step_done()
            if place == 1 and not is_replacement:
                die()
            ls.barrier()

        lockstep.nn.run_elastic(state, train)
        """,
        elastic(2, "2"),
        code=1,
    )
    assert "a replacement begins the program anew, so a program makes one call" in printed, printed


def test_seeds_make_runs_with_the_same_ranks_the_same(train):
    """With dropout: ranks that are killed in a step, and ranks that leave before it."""
    program = """
    model.append(nn.Dropout(0.5))
    state = lockstep.nn.ElasticState([model, optimizer, schedule, counts], seed=5)
    sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

    def end(point):
        if place == 2 and state.step == 4 and point == POINT:
            die() if POINT == "backward" else os._exit(0)

    lockstep.nn.run_elastic(state, make_train(8))
    save("parameters")
    """
    _, killed = train(3, program.replace("POINT", '"backward"'), elastic(3, "1:2"))
    _, left = train(3, program.replace("POINT", '"forward"'), elastic(3, "1:2"))
    assert largest_difference(killed, left) == 0


def test_groups_that_the_function_makes(train):
    printed, _ = train(
        4,
        """
        import torch.distributed as dist
        losses = []

        def train():
            group = dist.new_group([0, 1])
            world = dist.group.WORLD
            assert dist.get_world_size() == ls.get_world_size() and dist.get_backend() == "lockstep"
            while state.step < 6:
                if place == 3 and state.step == 3:
                    die()
                x = torch.full((3,), state.step + 1.0)
                work = dist.all_reduce(x, async_op=True)
                work.wait()
                assert x[0] == (state.step + 1) * dist.get_world_size()
                if dist.get_rank() < 2:
                    dist.all_reduce(x, group=group)
                state.step_done()
            print("trained over", ls.get_world_size())

        lockstep.nn.run_elastic(state, train)
        with raises(ls.UsageError, "has a default group; run_elastic makes it itself"):
            lockstep.nn.run_elastic(state, train)
        """,
        elastic(4, "1:3"),
    )
    assert printed.count("trained over 3") == 3, printed


def test_other_exceptions_leave(train):
    printed, _ = train(
        2,
        """
        def train():
            if place == 1:
                raise KeyError("mine")
            ls.barrier()

        with raises(KeyError if place == 1 else ls.EngineError, "mine" if place == 1 else "ends the job"):
            lockstep.nn.run_elastic(state, train)
        sys.exit(3)
        """,
        elastic(2, "2"),
        code=3,
    )


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


def test_a_replacement_that_does_not_fit_harms_nobody_else(train):
    """A network of other sizes, and one of another type, which torch would convert without a word."""
    _, alone = train(1, ALONE.replace("25", "12"))
    printed, killed = train(
        3,
        """
        if is_replacement and not os.path.exists("fits"):
            with open("rejected", "a") as file:
                file.write("x")
            if os.path.getsize("rejected") == 1:
                model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2)).double()
            else:
                model = model.float()
                open("fits", "w").close()
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
            state = lockstep.nn.ElasticState([model, optimizer, schedule, counts])

        def end(point):
            if place == 1 and state.step == 3 and point == "backward" and not is_replacement:
                die()
            while point == "forward" and state.step >= 9 and ls.get_world_size() < 3 and not ls.replacements_wait():
                time.sleep(0.01)

        lockstep.nn.run_elastic(state, make_train(12))
        save("parameters")
        """,
        elastic(3, "1"),
    )
    assert "cannot take the state of rank 0: RuntimeError: Error(s) in loading state_dict" in printed, printed
    assert "cannot take the state of rank 0: TypeError: 0.weight is torch.float32 here, and torch.float64 there" in printed, printed
    assert printed.count("of 3: step 12, ") == 3, printed
    assert largest_difference(alone, killed) < 1e-9


def test_the_same_command_resumes_when_all_ranks_were_lost(train, tmp_path):
    _, alone = train(1, ALONE.replace("25", "12"))
    program = """
    state = lockstep.nn.ElasticState([model, optimizer, schedule, counts], save="training.state", save_every=4)
    sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

    def end(point):
        if point == "backward" and state.step == 9 and not os.path.exists(f"lost-{place}"):
            open(f"lost-{place}", "w").close()
            ls.barrier()
            die()

    lockstep.nn.run_elastic(state, make_train(12))
    save("parameters")
    """
    printed, _ = train(2, program, elastic(2, "1"), code=128 + 9)
    assert "no rank is left to go on from" in printed, printed
    printed, resumed = train(2, program, elastic(2, "1"))
    assert largest_difference(alone, resumed) < 1e-9
    assert ": step 12, " in printed, printed
    # It is complete, and another command finds that.
    printed, again = train(1, program)
    assert largest_difference(resumed, again) == 0


def test_all_ranks_are_lost_one_after_the_other_before_the_first_step(train):
    """Nothing is lost: the replacements begin anew."""
    printed, _ = train(
        2,
        """
        if place == 1 and not is_replacement:
            die()
        pack = state._packed

        def pack_or_die():
            if not is_replacement:
                die()
            return pack()

        state._packed = pack_or_die
        lockstep.nn.run_elastic(state, make_train(3))
        save("parameters")
        """,
        elastic(2, "2"),
    )
    assert printed.count("of 2: step 3, ") == 2, printed


def test_a_rank_that_has_finished_tells_the_launcher(train):
    """Which then waits for it no more, whatever happens to the others: tests/cli."""
    train(
        2,
        """
        calls = []
        ls._core.finish_elastic = lambda: calls.append(state.step)
        lockstep.nn.run_elastic(state, make_train(3))
        assert calls == [3], calls
        """,
        elastic(2, "1"),
    )


def test_a_store_that_rank_0_cannot_open(train):
    train(
        3,
        """
        def refuse(*_, **__):
            raise RuntimeError("no port is free")

        ls.init_dist()
        if ls.get_rank() == 0:
            torch.distributed.TCPStore = refuse
        with raises(ls.EngineError, "rank 0 cannot open its store at ", "no port is free"):
            torch.distributed.init_process_group("lockstep", init_method="lockstep://")
        """,
    )


def test_an_exception_that_the_program_keeps_does_not_keep_its_ddp_acting(train):
    _, alone = train(1, ALONE.replace("25", "8"))
    _, killed = train(
        3,
        """
        kept = []
        inner = make_train(8)

        def train():
            try:
                inner()
            except Exception:
                kept.append(sys.exc_info())  # with the frames, and the DistributedDataParallel in one
                raise

        def end(point):
            if place == 2 and state.step == 3 and point == "backward":
                die()

        lockstep.nn.run_elastic(state, train)
        assert len(kept) == 1
        save("parameters")
        """,
        elastic(3, "1:2"),
    )
    assert largest_difference(alone, killed) < 1e-9


@pytest.mark.parametrize("frozen", ["before", "before, with a closure", "after", "wrapped anew"])
def test_a_parameter_that_is_thawed(train, frozen):
    """Its gradients are averaged only by a DistributedDataParallel that is made while it requires one: with losses or without."""
    train(
        2,
        f"""
        import warnings
        frozen = {frozen!r}
        bias = model[3].bias

        def train():
            bias.requires_grad_(state.step >= 2 or not frozen.startswith("before"))
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            for inputs, targets in DataLoader(data, batch_sampler=sampler):
                bias.requires_grad_(state.step == 2)
                if state.step == 2 and frozen == "wrapped anew":
                    ddp = DistributedDataParallel(model)

                def backward():
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(ddp(inputs), targets)
                    loss.backward()
                    return loss

                if "closure" in frozen:
                    step = lambda: optimizer.step(backward)
                else:
                    backward()
                    step = optimizer.step
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

        lockstep.nn.run_elastic(state, train)
        """,
        elastic(2, "2"),
    )


@pytest.mark.parametrize("snapshot", [False, True])
def test_parameters_that_the_program_changes_itself_in_a_step(train, snapshot):
    """As an average that is swapped in for validation: a step in which they have changed is not repeated from there."""
    program = f"""
        average = [p.detach().clone() for p in model.parameters()]
        state = lockstep.nn.ElasticState([model, optimizer, schedule, counts], snapshot={snapshot})
        sampler = lockstep.nn.ElasticBatchSampler(data, 20, state, drop_last=True)

        def end(point):
            if point == "forward" and state.step == 4:
                with torch.no_grad():
                    trained = [p.clone() for p in model.parameters()]
                    for p, other in zip(model.parameters(), average):
                        p.copy_(other)
                if place == 1:
                    die()
                ls.barrier()
                with torch.no_grad():
                    for p, own in zip(model.parameters(), trained):
                        p.copy_(own)

        lockstep.nn.run_elastic(state, make_train(8))
        save("parameters")
        """
    if snapshot:
        _, alone = train(1, ALONE.replace("25", "8"))
        _, killed = train(3, program, elastic(3, "1:2"))
        assert largest_difference(alone, killed) < 1e-9
    else:
        printed, _ = train(3, program, elastic(3, "1:2"), code=1)
        assert "cannot repeat step 4, which was not complete: parameters of the state have changed already" in printed, printed


def test_a_state_that_cannot_be_given_away(train):
    """What pickle refuses harms the replacement, not the ranks that have it."""
    printed, _ = train(
        2,
        """
        def end(point):
            if state.step == 1:
                counts["what"] = type("Hidden", (), {})()
            if place == 1 and not is_replacement and state.step == 2 and point == "forward":
                die()
            if state.step == 6:
                while not is_replacement and ls.get_world_size() == 1 and not ls.replacements_wait():
                    time.sleep(0.01)

        lockstep.nn.run_elastic(state, make_train(8))
        print("went on")
        """,
        elastic(2, "1:2"),
    )
    assert "rank 0 cannot give its state" in printed and printed.count("went on") == 1, printed


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture
def nn():
    pytest.importorskip("torch")
    import lockstep.nn

    return lockstep.nn


def test_wrong_parts_are_refused(nn):
    import torch

    model = torch.nn.Linear(2, 2)
    for parts, text in [
        (model, "parts is a Linear; give a list"),
        ([model, 3], "part 1 is a int; expected a module"),
        ([lambda: 0], "part 0 is a function"),
        ([{"model": model}], "part 0, a dict, holds a Linear, which would be replaced by a copy"),
        ([model, [[torch.zeros(1, requires_grad=True)]]], "part 1, a list, holds a Tensor"),
        ([torch.nn.LazyLinear(2)], "part 0, a LazyLinear, has lazy parameters"),
    ]:
        with pytest.raises(lockstep.UsageError, match=text):
            nn.ElasticState(parts)
    state = nn.ElasticState([model, [1], {}])
    for call in (state.step_done, lambda: state.set_step(-1)):
        with pytest.raises(lockstep.UsageError):
            call()
    state.set_step(7)
    assert state.step == 7 and state.scale(5) == 1
    with pytest.raises(lockstep.UsageError, match="no rank has a sample"):
        state.scale(0)


def test_batches_are_those_of_torchs_sampler_and_a_function_of_the_step(nn):
    from torch.utils.data import DistributedSampler

    data = list(range(50))
    state = nn.ElasticState([{}])
    sampler = nn.ElasticBatchSampler(data, 8, state, seed=3)
    assert sampler.steps_per_epoch == len(sampler) == 7
    order = DistributedSampler(data, 1, 0, seed=3)
    for epoch in range(2):
        order.set_epoch(epoch)
        batches = list(sampler)
        assert [len(each) for each in batches] == [8] * 6 + [2]
        assert [index for each in batches for index in each] == list(order)
        state.set_step(state.step + 5)
        assert list(sampler) == batches[5:] and len(sampler) == 2 and sampler.epoch == epoch
        state.set_step(state.step + 2)
    assert list(nn.ElasticBatchSampler(data, 20, nn.ElasticState([]), shuffle=False, drop_last=True)) == [data[:20], data[20:40]]
    for length, batch, drop in (0, 4, False), (5, 0, False), (5, -1, False), (5, 6, True):
        with pytest.raises(lockstep.UsageError, match="make no step"):
            nn.ElasticBatchSampler(range(length), batch, state, drop_last=drop)


def test_an_empty_batch_is_refused_where_a_loader_would_make_it(train):
    train(
        3,
        """
        sampler = lockstep.nn.ElasticBatchSampler(range(22), 10, state)

        def train():
            with raises(ls.UsageError, "a step of 2 samples leaves some of 3 ranks without"):
                next(iter(sampler))
            assert [len(sampler.batch(step)) for step in (0, 2)] == [[4, 1], [3, 1], [3, 0]][ls.get_rank()]

        lockstep.nn.run_elastic(state, train)
        """,
    )


class Training:
    """A network and an optimizer in a state; run(step) trains with step(inputs, targets) for each batch of two epochs."""

    def __init__(self, nn, micro_batches=1, global_batch=6, **options):
        import torch

        torch.manual_seed(1)
        self.data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.state = nn.ElasticState([self.model, self.optimizer, *options.pop("parts", [])], **options)
        self.sampler = nn.ElasticBatchSampler(self.data, global_batch, self.state, micro_batches=micro_batches)
        self.nn = nn

    def backward(self, inputs, targets):
        loss = (self.model(inputs) - targets).square().mean() * self.state.scale(len(targets))
        loss.backward()

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        self.backward(inputs, targets)
        self.optimizer.step()
        self.state.step_done()

    def loader(self, **options):
        import torch

        return torch.utils.data.DataLoader(self.data, batch_sampler=self.sampler, **options)

    def epochs(self, step=None):
        for _ in self.state.epochs(self.sampler, 2):
            for inputs, targets in self.loader():
                (step or self.step)(inputs, targets)

    def run(self, train=None):
        import torch

        try:
            self.nn.run_elastic(self.state, train or self.epochs)
        finally:
            torch.distributed.destroy_process_group()
            lockstep.destroy_dist()


def test_what_changes_parameters_and_is_not_in_the_state(nn):
    import torch

    training = Training(nn)

    def optimizer_inside():
        training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
        training.epochs()

    with pytest.raises(lockstep.UsageError, match="an optimizer, SGD, that is not a part of the state has changed parameters"):
        training.run(optimizer_inside)
    stray = torch.nn.Linear(3, 2)

    def uses_stray(self, inputs, targets):
        (stray(inputs) - targets).square().mean().backward()
        self.step(inputs, targets)

    training = Training(nn, parts=[stray])
    with pytest.raises(lockstep.UsageError, match=r"parameter 2/(weight|bias) of the state \(part/name\) has got a gradient"):
        training.run(lambda: training.epochs(lambda *batch: uses_stray(training, *batch)))
    for by_hand in [stray], list(stray.parameters()):
        training = Training(nn, parts=[stray], by_hand=by_hand)
        training.run(lambda: training.epochs(lambda *batch: uses_stray(training, *batch)))  # noqa: B023
    stray.requires_grad_(False)
    training = Training(nn, parts=[stray])
    training.run()
    training = Training(nn)
    training.state = nn.ElasticState([torch.optim.SGD(stray.parameters(), 0.1)])
    with pytest.raises(lockstep.UsageError, match=r"a parameter of shape \(2, 3\) of an optimizer of the state"):
        training.run()


def test_gradients_that_no_optimizer_has_used(nn):
    def run(step):
        training = Training(nn)
        training.run(lambda: training.epochs(lambda *batch: step(training, *batch)))

    def sums(training, inputs, targets):  # gradient accumulation, as it must not be
        training.backward(inputs, targets)
        if training.state.step % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.state.step_done()

    with pytest.raises(lockstep.UsageError, match="no optimizer of the state has used the gradients of this step.*micro_batches"):
        run(sums)

    def leaves_out(training, inputs, targets):
        if training.state.step % 2:  # with the gradients of the step before
            training.state.step_done()
        elif training.state.step % 4 == 2:
            training.optimizer.zero_grad()
            training.backward(inputs, targets * float("inf"))  # as a GradScaler sees it
            training.state.step_done()
        else:
            training.step(inputs, targets)

    run(leaves_out)

    def begins_late(training, inputs, targets):
        """A step each, and from step 4 on the sum of two: each gradient is another tensor, of the same version."""
        training.optimizer.zero_grad()
        training.backward(inputs, targets)
        if training.state.step < 4:
            training.optimizer.step()
        training.state.step_done()

    with pytest.raises(lockstep.UsageError, match="no optimizer of the state has used the gradients of this step"):
        run(begins_late)

    def leaves_out_on_purpose(training, inputs, targets):
        training.backward(inputs, targets)
        training.optimizer.zero_grad()
        training.state.step_done()

    run(leaves_out_on_purpose)


def test_batches_that_are_no_steps(nn):
    training = Training(nn)

    def skips(*batch):
        if training.state.step != 2:
            training.step(*batch)

    def by_hand():
        while training.sampler.epoch < 2:
            for batch in training.loader():
                skips(*batch)

    with pytest.raises(lockstep.UsageError, match="of steps 0 to 3, were taken, and step 2 is not complete"):
        training.run(by_hand)
    training = Training(nn)
    with pytest.raises(lockstep.UsageError, match="epoch 0 was left after 2 of its 4 steps"):
        training.run(lambda: training.epochs(skips))
    training = Training(nn)
    with pytest.raises(lockstep.UsageError, match="of steps 0 to 3, were taken, and step 0 is not complete"):
        training.run(lambda: [training.backward(*batch) for batch in training.loader()])

    def leaves():  # workers have read ahead
        while training.state.step < 3:
            for batch in training.loader(num_workers=1):
                training.step(*batch)
                break

    training = Training(nn)
    training.run(leaves)
    assert training.state.step == 3


def test_epochs_end_once(nn):
    training = Training(nn)
    ends = []

    def train():
        for epoch in training.state.epochs(training.sampler, 3):
            assert training.sampler.epoch == epoch and len(training.sampler) == (0 if epoch == 0 else 4)
            n = sum(1 for batch in training.loader() if training.step(*batch) is None)
            assert training.sampler.epoch == epoch and len(training.sampler) == 0
            ends.append((epoch, n, training.state.step, training.state.epoch_ends))

    training.state.set_step(4, 0)  # the end of the first epoch is owed
    training.run(train)
    assert ends == [(0, 0, 4, 0), (1, 4, 8, 1), (2, 4, 12, 2)] and training.state.epoch_ends == 3
    training.state.set_step(8)  # as an own file says it, which has no ends
    training.run(lambda: ends.extend(training.state.epochs(training.sampler, 2)))
    assert len(ends) == 3 and training.state.epoch_ends == 2
    training.state.set_step(7, 0)
    with pytest.raises(lockstep.UsageError, match="7 steps and 0 ends of epochs of 4 steps do not fit"):
        training.run(train)
    for call in (lambda: next(training.state.epochs(training.sampler, 1)), lambda: training.state.set_step(1, -1)):
        with pytest.raises(lockstep.UsageError):
            call()


def test_micro_batches(nn):
    import torch

    whole, parts = Training(nn), Training(nn, micro_batches=3)
    whole.run()
    lasts = []

    def step(inputs, targets):
        assert len(inputs) == 2
        with parts.state.micro_batch() as last:
            parts.backward(inputs, targets)
        lasts.append(last)
        if last:
            with pytest.raises(lockstep.UsageError, match="the 3 of step . are done"), parts.state.micro_batch():
                pass
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            parts.state.step_done()

    parts.run(lambda: parts.epochs(step))
    assert lasts == [False, False, True] * 8
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict())
    assert parts.state.scale(2) == 2 / 6 and parts.state.scale(2, 8) == 2 / 8
    with pytest.raises(lockstep.UsageError, match="there is no micro batch 3 of 3"):
        parts.sampler.batch(0, 3)
    with pytest.raises(lockstep.UsageError, match="another number of micro_batches"):
        nn.ElasticBatchSampler(parts.data, 6, parts.state, micro_batches=2)
    with pytest.raises(lockstep.UsageError, match="no ElasticBatchSampler of this state has micro_batches"), whole.state.micro_batch():
        pass
    parts = Training(nn, micro_batches=3)
    with pytest.raises(lockstep.UsageError, match="0 of the 3 micro batches of step 0 are done"):
        parts.run()


def test_a_file_of_the_state(nn, tmp_path):
    import torch

    path = tmp_path / "training.state"
    whole, first, second = Training(nn), Training(nn, save=path), Training(nn, save=path)
    whole.run()

    def stops(*batch):
        if first.state.step == 6:
            raise KeyError("here")
        first.step(*batch)

    with pytest.raises(KeyError):
        first.run(lambda: first.epochs(stops))
    values = torch.load(path, weights_only=False)
    assert (values["step"], values["epoch_ends"]) == (4, 1)  # at the end of the first epoch
    second.run()
    assert (second.state.step, second.state.epoch_ends) == (8, 2)
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    written = path.read_bytes()
    path.write_bytes(written[:99] + b"x" + written[100:])
    with pytest.raises(lockstep.UsageError, match=f"rank 0 cannot read {path}: ValueError: it is damaged"):
        Training(nn, save=path).run()
    path.write_bytes(written)
    with pytest.raises(lockstep.UsageError, match="it has 2 parts, and the state here 3"):
        Training(nn, save=path, parts=[[1]]).run()
    with pytest.raises(FileNotFoundError):
        Training(nn, save=tmp_path / "none" / "state").run()
    for options in {"save_every": 2}, {"save": path, "save_every": -1}:
        with pytest.raises(lockstep.UsageError, match="save_every"):
            Training(nn, **options)


def test_a_file_of_another_sampler(nn, tmp_path):
    """4 steps in epochs of 4 are two epochs of 2 steps, of which nothing would be left to do."""
    path = tmp_path / "training.state"

    def resume(*, expected=None, step=None, in_epochs=True, **options):
        training = Training(nn, save=path, **options)

        def train():
            if step is not None:
                training.state.set_step(step)
            if in_epochs:
                return training.epochs()
            for inputs, targets in training.loader():
                training.step(inputs, targets)

        if expected is None:
            training.run(train)
        else:
            with pytest.raises(lockstep.UsageError, match=expected):
                training.run(train)
        return training.state

    first = Training(nn, save=path)
    first.run(lambda: [first.step(*batch) for batch in first.loader()])
    written = path.read_bytes()
    for in_epochs in True, False:
        refused = "counts its 4 steps in epochs of 4, and this sampler's have 2: some samples would be left out"
        resume(global_batch=12, in_epochs=in_epochs, expected=refused)
        path.write_bytes(written)
        assert resume(global_batch=12, in_epochs=in_epochs, step=2).step == 4
        path.write_bytes(written)
        assert resume(in_epochs=in_epochs).step == 8
        path.write_bytes(written)

    several = Training(nn, save=path)
    other = nn.ElasticBatchSampler(several.data, 12, several.state)

    def train():
        for sampler in (several.sampler, other):
            for batch in sampler:
                several.step(*several.data[batch])

    several.run(train)
    assert resume(global_batch=24, in_epochs=False).step > several.state.step


def test_the_former_name_of_step_done():
    with pytest.warns(DeprecationWarning, match="is called lockstep.step_done"):
        lockstep.count_step()


def test_a_loader_that_begins_again_in_an_epoch_draws_nothing(nn):
    """It draws a number for its workers when it begins; after a loss it begins once more than without one."""
    import torch

    drawn = []
    for n_workers, leaves in (0, False), (0, True), (1, False), (1, True):
        training = Training(nn)
        torch.manual_seed(5)

        def train(n_workers=n_workers, leaves=leaves, training=training):
            while training.state.step < 8:
                for batch in training.loader(num_workers=n_workers):
                    training.step(*batch)
                    if leaves and training.state.step == 6:
                        break

        training.run(train)
        drawn.append(torch.rand(3).tolist())
    assert drawn[1:] == drawn[:1] * 3


def test_generators_whatever_has_drawn(nn):
    """What is kept anew only if it has changed: also by the second one of a pair of normal numbers, which changes no words."""
    import random

    import numpy
    import torch

    from lockstep._elastic_state import _generators, _set_generators

    for seed, draw in (random.seed, random.gauss), (numpy.random.seed, numpy.random.normal):
        kept = _generators({})
        for n in 2, 1, 2:  # the same words, without the second one of a pair and with it
            seed(4)
            for _ in range(n):
                draw(0, 1)
            kept = _generators(kept)
            expected = draw(0, 1)
            _set_generators(kept)
            assert draw(0, 1) == expected, (draw, n)
            _set_generators(kept)
    former = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None
    if former is not None:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        kept = _generators(_generators({}))
        expected = numpy.random.rand()
        _set_generators(kept)
        assert numpy.random.rand() == expected
        numpy.random.set_bit_generator(former)

    draws = [random.random, lambda: random.gauss(0, 1), numpy.random.rand, numpy.random.standard_normal, lambda: torch.rand(1).item()]
    kept = _generators({})
    for draw in [*draws, *draws, *draws[::-1]]:
        before = draw()
        kept = _generators(kept)
        expected = [draw() for draw in draws]
        _set_generators(kept)
        assert [draw() for draw in draws] == expected, (draws.index(draw), before)
        _set_generators(kept)
