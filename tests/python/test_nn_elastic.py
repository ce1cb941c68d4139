"""The state and the batches of lockstep.nn.run_elastic, in a process of its own."""

import random

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DistributedSampler  # noqa: E402

import lockstep  # noqa: E402
import lockstep.nn as nn  # noqa: E402
from lockstep import _elastic_parts  # noqa: E402
from lockstep._elastic_parts import _Tensors  # noqa: E402
from lockstep._elastic_state import _generators, _set_generators  # noqa: E402


def test_wrong_parts_are_refused():
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


def test_batches_are_those_of_torchs_sampler_and_a_function_of_the_step():
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


class Training:
    """A network and an optimizer in a state; run(step) trains with step(inputs, targets) for each batch of two epochs."""

    def __init__(self, micro_batches=1, global_batch=6, **options):
        torch.manual_seed(1)
        self.data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.state = nn.ElasticState([self.model, self.optimizer, *options.pop("parts", [])], **options)
        self.sampler = nn.ElasticBatchSampler(self.data, global_batch, self.state, micro_batches=micro_batches)

    def backward(self, inputs, targets):
        loss = (self.model(inputs) - targets).square().mean() * self.state.scale(len(targets))
        loss.backward()

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        self.backward(inputs, targets)
        self.optimizer.step()
        self.state.step_done()

    def loader(self, **options):
        return torch.utils.data.DataLoader(self.data, batch_sampler=self.sampler, **options)

    def epochs(self, step=None):
        for _ in self.state.epochs(self.sampler, 2):
            for inputs, targets in self.loader():
                (step or self.step)(inputs, targets)

    def run(self, train=None):
        try:
            nn.run_elastic(self.state, train or self.epochs)
        finally:
            torch.distributed.destroy_process_group()
            lockstep.destroy_dist()


def test_what_changes_parameters_and_is_not_in_the_state():
    training = Training()

    def optimizer_inside():
        training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
        training.epochs()

    with pytest.raises(lockstep.UsageError, match="an optimizer, SGD, that is not a part of the state has changed parameters"):
        training.run(optimizer_inside)
    stray = torch.nn.Linear(3, 2)

    def uses_stray(self, inputs, targets):
        (stray(inputs) - targets).square().mean().backward()
        self.step(inputs, targets)

    training = Training(parts=[stray])
    with pytest.raises(lockstep.UsageError, match=r"parameter 2/(weight|bias) of the state \(part/name\) has got a gradient"):
        training.run(lambda: training.epochs(lambda *batch: uses_stray(training, *batch)))
    for by_hand in [stray], list(stray.parameters()):
        training = Training(parts=[stray], by_hand=by_hand)
        training.run(lambda: training.epochs(lambda *batch: uses_stray(training, *batch)))  # noqa: B023
    stray.requires_grad_(False)
    training = Training(parts=[stray])
    training.run()
    training = Training()
    training.state = nn.ElasticState([torch.optim.SGD(stray.parameters(), 0.1)])
    with pytest.raises(lockstep.UsageError, match=r"a parameter of shape \(2, 3\) of an optimizer of the state"):
        training.run()


def test_gradients_that_no_optimizer_has_used():
    def run(step):
        training = Training()
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


def test_batches_that_are_no_steps():
    training = Training()

    def skips(*batch):
        if training.state.step != 2:
            training.step(*batch)

    def by_hand():
        while training.sampler.epoch < 2:
            for batch in training.loader():
                skips(*batch)

    with pytest.raises(lockstep.UsageError, match="of steps 0 to 3, were taken, and step 2 is not complete"):
        training.run(by_hand)
    training = Training()
    with pytest.raises(lockstep.UsageError, match="epoch 0 was left after 2 of its 4 steps"):
        training.run(lambda: training.epochs(skips))
    training = Training()
    with pytest.raises(lockstep.UsageError, match="of steps 0 to 3, were taken, and step 0 is not complete"):
        training.run(lambda: [training.backward(*batch) for batch in training.loader()])

    def leaves():  # workers have read ahead
        while training.state.step < 3:
            for batch in training.loader(num_workers=1):
                training.step(*batch)
                break

    training = Training()
    training.run(leaves)
    assert training.state.step == 3


def test_epochs_end_once():
    training = Training()
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


def test_micro_batches():
    whole, parts = Training(), Training(micro_batches=3)
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
    parts = Training(micro_batches=3)
    with pytest.raises(lockstep.UsageError, match="0 of the 3 micro batches of step 0 are done"):
        parts.run()


def test_a_file_of_the_state(tmp_path):
    path = tmp_path / "training.state"
    whole, first, second = Training(), Training(save=path), Training(save=path)
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
        Training(save=path).run()
    path.write_bytes(written)
    with pytest.raises(lockstep.UsageError, match="it has 2 parts, and the state here 3"):
        Training(save=path, parts=[[1]]).run()
    with pytest.raises(FileNotFoundError):
        Training(save=tmp_path / "none" / "state").run()
    for options in {"save_every": 2}, {"save": path, "save_every": -1}:
        with pytest.raises(lockstep.UsageError, match="save_every"):
            Training(**options)


def test_a_file_of_another_sampler(tmp_path):
    """4 steps in epochs of 4 are two epochs of 2 steps, of which nothing would be left to do."""
    path = tmp_path / "training.state"

    def resume(*, expected=None, step=None, in_epochs=True, **options):
        training = Training(save=path, **options)

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

    first = Training(save=path)
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

    several = Training(save=path)
    other = nn.ElasticBatchSampler(several.data, 12, several.state)

    def train():
        for sampler in (several.sampler, other):
            for batch in sampler:
                several.step(*several.data[batch])

    several.run(train)
    assert resume(global_batch=24, in_epochs=False).step > several.state.step


def test_a_loader_that_begins_again_in_an_epoch_draws_nothing():
    """It draws a number for its workers when it begins; after a loss it begins once more than without one."""
    drawn = []
    for n_workers, leaves in (0, False), (0, True), (1, False), (1, True):
        training = Training()
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


def test_buffers_that_no_cat_takes_are_set_back():
    module = torch.nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    for name, scale in ("fine", 0.1), ("coarse", 1.0):
        module.register_buffer(name, torch.quantize_per_tensor(torch.tensor([10 * scale]), scale, 0, torch.qint8))
    tensors = _Tensors([module._buffers])
    tensors.keep()
    former = module.sparse
    with torch.no_grad():
        module.sparse.mul_(2)
        for name in "fine", "coarse":
            module.get_buffer(name).copy_(torch.zeros(1))
    module.register_buffer("added", torch.zeros(1))
    tensors.set_back()
    assert "added" not in module._buffers and module.sparse is former and torch.equal(module.sparse.to_dense(), torch.eye(3))
    assert module.fine.dequantize().item() == pytest.approx(1) and module.coarse.dequantize().item() == 10


@torch.no_grad()
def test_buffers_whose_type_or_shape_changes_are_set_back():
    def set_all(buffers, values):
        for name, value in values.items():
            buffers[name].data = value.clone()

    states = [
        {"a": torch.tensor([2**24 + 1]), "b": torch.tensor([1, 2]), "c": torch.tensor(3.0), "d": torch.tensor([2**24 + 1]).double()},
        {"a": torch.tensor([2**24 + 1]), "b": torch.tensor([1.5]), "c": torch.tensor([3.0, 4.0]), "d": torch.tensor([1.0])},
        {"a": torch.tensor([5, 2**24 + 1]), "b": torch.tensor([2]), "c": torch.tensor(5.0), "d": torch.tensor([[1.0]])},
    ]
    buffers = {name: value.clone() for name, value in states[0].items()}
    former = dict(buffers)
    tensors = _Tensors([buffers])
    for kept in states:
        set_all(buffers, kept)
        tensors.keep()
        for state in states:
            set_all(buffers, state)
            tensors.set_back()
            for name, value in kept.items():
                assert buffers[name] is former[name] and value.dtype == buffers[name].dtype and torch.equal(value, buffers[name])


@torch.no_grad()
def test_buffers_that_are_not_persistent_are_those_of_the_other_rank():
    ranks = []
    for value in torch.tensor([2**24 + 1]).double(), torch.zeros(3):
        module = torch.nn.Module()
        module.register_buffer("cache", value, persistent=False)
        ranks.append(_elastic_parts.Module(module, snapshot=False))
        ranks[-1].keep()
    ranks[1].load(ranks[0].values())
    assert ranks[1].module.cache.dtype == torch.float64 and ranks[1].module.cache.tolist() == [2**24 + 1]


def test_generators_whatever_has_drawn():
    """What is kept anew only if it has changed: also by the second one of a pair of normal numbers, which changes no words."""
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
