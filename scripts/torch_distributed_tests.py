#!/usr/bin/env python3
"""PyTorch's own DistributedTest, from the installed torch, over one backend.

usage: torch_distributed_tests.py [--backend lockstep] [--ranks 3] [--only TEXT[,TEXT...]]

Run it with a Python that has torch, numpy, expecttest and, for the backend lockstep, this package. The tests are
unchanged, and those are run that run over Gloo: they are chosen while the backend is called gloo, and run over the
one given. Prints one line for each test, which suites it does not have, and the numbers of tests that passed,
failed and were skipped; ends with 1 if one failed.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import unittest

NOT_RUN = (
    "not run: test_c10d_common.py and the fault-tolerance tests of PyTorch's sources (test/distributed): "
    "they are not in the torch wheel, and the package index has no source distribution of torch"
)


class LikeGloo(str):
    """The name of a backend, for which the tests make the same exceptions as for gloo."""

    def __eq__(self, other):
        return other in ("gloo", str(self))

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")

    def __str__(self):
        return self[:]


def load(backend):
    """The test case. The module reads its environment when it is imported."""
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = LikeGloo(backend)
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(distributed_test, name).append(backend)

    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    Tests.__module__ = "__main__"
    return Tests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="lockstep")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="names of tests contain one of these")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(folder, name))
        os.environ.update(WORLD_SIZE=str(options.ranks), TEMP_DIR=folder)
        case = load(options.backend)
        names = [
            name
            for name in unittest.TestLoader().getTestCaseNames(case)
            if any(part in name for part in options.only.split(","))
        ]
        suite = unittest.TestSuite(case(name) for name in names)
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    n_failed, n_skipped = len(result.failures) + len(result.errors), len(result.skipped)
    n_passed = result.testsRun - n_failed - n_skipped
    print(NOT_RUN)
    print(f"{options.backend}, {options.ranks} ranks: {n_passed} passed, {n_failed} failed, {n_skipped} skipped")
    return n_failed > 0


if __name__ == "__main__":
    sys.exit(main())
