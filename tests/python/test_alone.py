"""A process without a launcher: the solo group, arguments, and errors."""

import array
import ast
import datetime
import gc
import inspect
import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

import lockstep as ls

HERE = Path(__file__).name
FUNCTIONS = [ls.all_reduce, ls.broadcast, ls.all_gather, ls.gather]


class Tensor:
    """Exports DLPack but no buffer, like torch.Tensor."""

    def __init__(self, x):
        self.x = x
        self.shape = x.shape

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_world_queries():
    assert ls.get_dist_info() == (0, 1)
    assert (ls.get_rank(), ls.get_world_size()) == (0, 1)
    assert (ls.get_local_rank(), ls.get_local_size()) == (0, 1)
    assert ls.get_backend() is None
    assert ls.is_main_process()
    assert not ls.is_distributed()
    assert ls.infer_launcher() == "none"
    ls.barrier()


def test_names_that_only_torch_has_say_so():
    with pytest.raises(AttributeError, match="call that of torch.distributed"):
        ls.reduce  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'all_redcue'"):
        ls.all_redcue  # type: ignore[attr-defined]  # noqa: B018


def test_init_and_destroy():
    ls.init_dist(launcher="none", timeout=datetime.timedelta(seconds=7))
    try:
        assert ls.is_distributed()
        assert ls.get_backend() == "solo"
        assert ls.default_group().timeout == 7
        with pytest.raises(ls.UsageError, match="destroy_dist first"):
            ls.init_dist()
    finally:
        ls.destroy_dist()
    assert not ls.is_distributed()


@pytest.mark.parametrize("given", [{"launcher": "pbs"}, {"backend": "nmi"}, {"timeout": -1}, {"timeout": "long"}])
def test_init_rejects(given):
    with pytest.raises(ls.UsageError, match=f" at {HERE}:"):
        ls.init_dist(**given)


TYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


@pytest.mark.parametrize("dtype", TYPES)
def test_element_types(dtype):
    x = np.ones((2, 3), dtype)
    ls.all_reduce(x, "max")
    ls.broadcast(x)
    [gathered] = ls.all_gather(x)
    assert gathered.dtype == x.dtype and gathered.shape == (2, 3)
    assert np.array_equal(gathered, x) and gathered is not x
    assert np.array_equal(ls.gather(x)[0], x)


@pytest.mark.parametrize("buffer", [bytearray(b"abc"), array.array("d", [1, 2]), memoryview(array.array("h", [1, 2]))])
def test_buffers_other_than_arrays(buffer):
    ls.all_reduce(buffer)
    [gathered] = ls.all_gather(buffer)
    assert gathered == memoryview(buffer)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors(dtype):
    x = np.ones((2, 3), dtype)
    ls.all_reduce(Tensor(x), "min")
    ls.broadcast(Tensor(x[1]))
    [gathered] = ls.all_gather(Tensor(x))
    assert gathered.dtype == x.dtype and np.array_equal(gathered, x)


@pytest.mark.parametrize(
    "x, text", [(np.zeros((4, 4))[:, 1], "not C-contiguous"), (np.zeros(2, complex), "expected bool, integers"), (np.zeros(0), None)]
)
def test_rejected_tensors(x, text):
    if text is None:
        ls.all_reduce(Tensor(x))
        return
    with pytest.raises(ls.UsageError, match=text):
        ls.all_reduce(Tensor(x))


def test_a_tensor_that_rejects():
    x = np.zeros(2)
    x.flags.writeable = False
    with pytest.raises(ls.UsageError, match=r"data \(Tensor\) must be a writable CPU tensor"):
        ls.all_reduce(Tensor(x))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_shapes(shape):
    x = np.zeros(shape)
    ls.all_reduce(x)
    assert ls.all_gather(x)[0].shape == shape
    assert ls.all_gather(memoryview(bytearray(0)))[0].nbytes == 0


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "data, text",
    [
        (np.zeros((4, 4))[:, 1], "not C-contiguous"),
        (np.asfortranarray(np.zeros((2, 3))), "not C-contiguous"),
        (np.zeros(3)[::-1], "not C-contiguous"),
        (np.zeros(2, complex), "type complex128"),
        (np.zeros(2, ">f8"), "type >f8"),
        (np.zeros(2, "datetime64[s]"), "cannot export a buffer"),
        (np.array([None]), "type object"),
        ([1.0, 2.0], r"data \(list\) has neither the buffer protocol nor DLPack"),
        (1.0, r"data \(float\) has neither"),
        (None, r"data \(NoneType\) has neither"),
    ],
)
def test_rejected_data(function, data, text):
    with pytest.raises(ls.UsageError, match=text) as caught:
        function(data)
    assert f"{function.__name__} on group" in str(caught.value)
    assert f" at {HERE}:" in str(caught.value)


@pytest.mark.parametrize("data", [b"abc", np.broadcast_to(np.zeros(1), 1)])
def test_read_only_data(data):
    with pytest.raises(ls.UsageError, match="is read-only, and the result is written to it"):
        ls.all_reduce(data)
    ls.all_gather(data)  # only reads


def test_operations_are_checked():
    with pytest.raises(ls.UsageError, match="sum, product, min, max"):
        ls.all_reduce(np.zeros(1), "average")
    with pytest.raises(ls.UsageError, match='as "sum"'):
        ls.all_reduce(np.zeros(1), 3)
    with pytest.raises(ls.UsageError, match="sum of bool: use bor"):
        ls.all_reduce(np.zeros(1, bool))
    with pytest.raises(ls.UsageError, match="bor of f64"):
        ls.all_reduce(np.zeros(1), "BOR")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ls.broadcast(np.zeros(1), src=1),
        lambda: ls.gather(np.zeros(1), dst=-1),
        lambda: ls.gather_object(0, dst=1),
        lambda: ls.broadcast_object_list([0], src=2),
    ],
)
def test_ranks_are_checked(call):
    with pytest.raises(ls.UsageError, match="the group's ranks are 0 to 0"):
        call()


@pytest.mark.parametrize("timeout", ["soon", float("nan"), [1]])
def test_timeouts_are_checked(timeout):
    with pytest.raises(ls.UsageError, match="expected seconds"):
        ls.barrier(timeout=timeout)


def test_an_error_says_where():
    with pytest.raises(ls.UsageError) as caught:
        ls.all_reduce([])  # this line
    error = caught.value
    assert Path(__file__).read_text().splitlines()[error.lineno - 1].endswith("# this line")
    assert error.filename == __file__
    assert (error.operation, error.rank, error.sequence) == ("all_reduce", 0, 0)
    assert str(error).endswith(error.text)
    assert isinstance(error, RuntimeError)


def test_an_error_within_the_package_says_the_callers_line():
    with pytest.raises(ls.UsageError) as caught:
        ls.gather_object("x", dst=3)  # that line
    assert Path(__file__).read_text().splitlines()[caught.value.lineno - 1].endswith("# that line")


def test_errors_can_be_pickled():
    with pytest.raises(ls.Error) as caught:
        ls.all_reduce([])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ls.UsageError
    assert (str(copy), copy.lineno) == (str(caught.value), caught.value.lineno)


def test_groups():
    world = ls.default_group()
    half = world.split(0)
    assert (half.rank, half.size, half.backend) == (0, 1, "solo")
    assert half != world and half == half and world == ls.default_group()
    assert hash(world) == hash(ls.default_group())
    ls.all_reduce(np.ones(1), group=half)
    with pytest.raises(ls.UsageError, match="color is -1"):
        world.split(-1)
    assert repr(half.duplicate()).startswith("<lockstep.Group ")
    with pytest.raises(TypeError):
        ls.barrier(group=3)


def test_objects():
    value = {"a": [1, None, "x"], 2: np.arange(3)}
    [same] = ls.all_gather_object(value)
    assert same["a"] == value["a"] and np.array_equal(same[2], value[2])
    assert ls.gather_object(("x", 1)) == [("x", 1)]
    items = [1, "two", None]
    ls.broadcast_object_list(items)
    assert items == [1, "two", None]
    assert ls.collect_results([1, None, 3, 4], 3) == [1, None, 3]
    assert ls.collect_results([], 0) == []
    with pytest.raises(Exception, match="pickle"):
        ls.all_gather_object(lambda: 0)


def test_dicts():
    array_value = np.array([1.5, 2.5], "f4")
    data = {"loss": 0.5, "n": 3, "grad": array_value, "acc": np.float32(0.25)}
    ls.all_reduce_dict(data, "mean")
    assert data == {"loss": 0.5, "n": 3, "grad": array_value, "acc": 0.25}
    assert type(data["n"]) is float and data["grad"] is array_value
    for bad, text in [({"x": True}, "is a bool"), ({"x": 1 << 70}, "64 bits"), ({1: 2.0}, "must be a str"), ({"x": "y"}, "neither")]:
        with pytest.raises(ls.UsageError, match=text):
            ls.all_reduce_dict(bad)


def test_control_flow():
    @ls.master_only
    def double(x):
        "doubles"
        return 2 * x

    assert double(3) == 6 and double.__doc__ == "doubles"
    assert ls.main_process_first(lambda: "made") == "made"
    with pytest.raises(ZeroDivisionError):
        ls.main_process_first(lambda: 1 / 0)
    assert 0 <= ls.sync_random_seed() < 2**31


def test_the_package_needs_no_numpy():
    import subprocess
    import sys

    program = "import lockstep, sys; x = bytearray(8); lockstep.all_reduce(x); lockstep.all_gather(x); " \
              "sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_rank_of_several_must_join(monkeypatch):
    import os
    import subprocess
    import sys

    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    program = "import lockstep; lockstep.get_rank()"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert "UsageError" in done.stderr and "never called init_dist" in done.stderr


class Text:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def test_keys_and_texts_that_are_no_utf8():
    values = {"a": 1, "a\0b": 2, "\udcff": 3, "\ud800": 4, "\\ud800": 5, "\ufffd": 6.5}  # noqa: F601 - not equal
    expected = dict(values)
    ls.all_reduce_dict(values)
    assert values == expected
    with pytest.raises(ls.UsageError, match="bool"):
        ls.all_reduce_dict({"\ud800": True})
    for op in ["\ud800", "sum\0", Text("\ud800")]:
        with pytest.raises(ls.UsageError):
            ls.all_reduce(np.zeros(1), op)
    with pytest.raises(ls.UsageError):
        ls.barrier(timeout=Text("\ud800"))


def test_a_file_whose_name_is_no_utf8():
    program = compile("import lockstep; lockstep.broadcast_object_list([0], src=2)", "\udcff.py", "exec")
    with pytest.raises(ls.UsageError) as caught:
        exec(program)
    assert caught.value.filename.endswith(".py") and caught.value.lineno == 1


def test_a_cut_text_of_two_byte_characters():
    group = ls.default_group().duplicate()
    for pad in ["", "x"]:
        with pytest.raises(ValueError, match="ä"):
            ls.main_process_first(lambda pad=pad: (_ for _ in ()).throw(ValueError(pad + "ä" * 5000)), group)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_unpickling_that_is_interrupted(kind):
    thing = Raises(kind)
    for call in [lambda: ls.all_gather_object(thing), lambda: ls.gather_object(thing)]:
        with pytest.raises(kind):
            call()
    with pytest.raises(ls.MismatchError, match="ValueError"):
        ls.all_gather_object(Raises(ValueError))
    ls.barrier()


def raise_it(kind):
    raise kind


class Raises:
    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return raise_it, (self.kind,)


def test_groups_compare_with_anything():
    assert ls.default_group() != "world"
    assert ls.default_group() != None  # noqa: E711
    assert ls.default_group() == ls.default_group()


def test_masked_arrays_are_rejected():
    masked = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    for function in FUNCTIONS:
        with pytest.raises(ls.UsageError, match="mask"):
            function(masked)
        function(masked.data)


def test_a_shape_that_is_not_that_of_the_data():
    wrong = Tensor(np.zeros(4))
    wrong.shape = (5,)
    for function in [ls.all_gather, ls.gather]:
        with pytest.raises(ls.UsageError, match="shape"):
            function(wrong)


def test_empty_views_keep_their_shape():
    view = memoryview(bytearray(6)).cast("B", (2, 3))[:0]
    assert view.shape == (0, 3)
    [part] = ls.all_gather(view)
    assert part.shape == (0, 3)


def test_names_of_mmengine():
    assert ls.all_gather_object(data=1) == [1]
    assert ls.gather_object(data=1) == [1]
    ls.broadcast_object_list(data=[1])
    assert ls.collect_results([1, 2], 2, "cpu") == [1, 2]
    assert ls.collect_results(results=[1, 2], size=1, device="cpu") == [1]
    with pytest.raises(ls.UsageError, match="device"):
        ls.collect_results([1], 1, "/tmp")


def test_help_says_what_the_stubs_say():
    def compare(owner, nodes):
        for node in nodes:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
                continue
            stub = ast.get_docstring(node)
            if stub:
                assert " ".join(stub.split()) in " ".join(inspect.getdoc(getattr(owner, node.name)).split())
                names.append(node.name)
            if isinstance(node, ast.ClassDef):
                compare(getattr(owner, node.name), node.body)

    names = []
    compare(ls._core, ast.parse(Path(ls.__file__).with_name("_core.pyi").read_text()).body)
    assert "all_reduce" in names and "split" in names


def test_arguments_of_another_type():
    for bad in "foo", [("x", 1.0)], None:
        with pytest.raises(ls.UsageError, match="all_reduce_dict.*data is .*dict") as caught:
            ls.all_reduce_dict(bad)
        assert isinstance(caught.value, TypeError)
    for bad in "foo", (1, 2), None:
        with pytest.raises(ls.UsageError, match="broadcast_object_list.*data is .*list") as caught:
            ls.broadcast_object_list(bad)
        assert isinstance(caught.value, TypeError)


def test_the_timeout_error_is_the_builtin_too():
    import builtins

    assert issubclass(ls.TimeoutError, builtins.TimeoutError) and issubclass(ls.TimeoutError, ls.Error)
    names = {}
    exec("from lockstep import *", names)
    assert "TimeoutError" not in names and "UsageError" in names
    again = pickle.loads(pickle.dumps(ls.TimeoutError("late")))
    assert type(again) is ls.TimeoutError and str(again) == "late"


def test_lockstep_nn_without_torch_says_what_to_install():
    import subprocess
    import sys

    program = "import sys; sys.modules['torch'] = None\nimport lockstep\nimport lockstep.nn"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ") and "lockstep.nn" in last and "pip install torch" in last, done.stderr


@pytest.mark.parametrize("results", [{"image": 1}, "abc", None, (1, 2), range(2)])
def test_collected_results_are_a_list(results):
    with pytest.raises(ls.UsageError, match=f"results is {type(results).__name__}; it must be a list"):
        ls.collect_results(results, 9)


def test_unsupported_types_have_the_names_of_numpy():
    for name in "complex128", "|S3":
        with pytest.raises(ls.UsageError, match=re.escape(f"has elements of type {name};")):
            ls.all_reduce(np.zeros(2, dtype=name))


def test_lines_of_code_that_is_gone_are_forgotten():
    """Cells of a notebook: their code is not kept alive, and no other code has their lines."""
    ends = []
    for i in range(4):  # the last error may be kept somewhere
        code = compile("\n" * i + "ls.all_reduce(np.zeros(2, dtype=complex))", f"cell{i}", "exec")
        weakref.finalize(code, ends.append, i)
        with pytest.raises(ls.UsageError, match=f"cell{i}:{i + 1}"):
            exec(code)
        del code
    gc.collect()
    assert ends[:3] == [0, 1, 2]
