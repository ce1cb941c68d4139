"""in_ranks.py FILE: what `run_ranks` starts as each rank. FILE has a function of a test module, pickled, with its arguments."""

import pickle
import sys

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        body, init, arguments = pickle.load(file)
    body = getattr(body, "__wrapped__", body)  # of a test that on_ranks made
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    arguments.update(init() if init else {})
    body(**{name: arguments[name] for name in names if name in arguments})
    with open("returned", "a") as file:
        file.write("x")
