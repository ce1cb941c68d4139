"""_core.pyi, which type checkers and the reference read, says what the extension module has."""

import ast
import inspect
from pathlib import Path

import lockstep
from lockstep import _core

STUB = ast.parse((Path(lockstep.__file__).parent / "_core.pyi").read_text())


def functions_of(node):
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def classes_of(node):
    return {each.name: each for each in node.body if isinstance(each, ast.ClassDef) and each.name != "_Tensor"}


def of_stub(function):
    """The parameters with their defaults, and the docstring."""
    arguments = function.args
    assert not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs)
    names = [each.arg for each in arguments.args]
    defaults = [ast.literal_eval(each) for each in arguments.defaults]
    return names, defaults, ast.get_docstring(function)


def of_module(function):
    signature, docstring, defaults = function.__nb_signature__[0]  # nanobind's; of its overloads the last ones take anything
    for place in range(len(defaults or ())):
        signature = signature.replace(f"\\{place}", "...", 1)
    names, _, _ = of_stub(ast.parse(signature + ": ...").body[0])
    return names, list(defaults or ()), docstring and inspect.cleandoc(docstring)


def is_public(name):
    return not name.startswith("_")


def test_the_stub_has_the_functions_of_the_module():
    stub = functions_of(STUB)
    module = {name: value for name, value in vars(_core).items() if type(value).__name__ == "nb_func"}
    assert stub.keys() == module.keys()
    assert {name: of_stub(each) for name, each in stub.items()} == {name: of_module(each) for name, each in module.items()}


def test_the_stub_has_the_classes_of_the_module():
    classes = classes_of(STUB)
    module = {name: value for name, value in vars(_core).items() if inspect.isclass(value)}
    assert classes.keys() == module.keys()
    for name, stub in classes.items():
        members = {each: value for each, value in vars(module[name]).items() if is_public(each)}
        assert {each for each in functions_of(stub) if is_public(each)} == members.keys(), name
        for member, function in functions_of(stub).items():
            if not is_public(member):
                continue
            if isinstance(members[member], property):
                assert members[member].__doc__ == ast.get_docstring(function), member
            else:
                assert of_module(members[member]) == of_stub(function), member
    group = ast.get_docstring(classes["Group"])
    assert inspect.cleandoc(_core.Group.__doc__).split() == group.split()
