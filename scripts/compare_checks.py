#!/usr/bin/env python3
"""What comparing calls costs over the shared engine: LOCKSTEP_CHECK=off, light and full, by turns.

compare_checks.py [--rounds N] BUILD [NAME=ANOTHER_BUILD ...]

BUILD: build/release, say. ANOTHER_BUILD: one to compare with, as one whose fingerprint_of
(src/engines/shared/protocol/channel.cpp) returns 0 at once and so compares nothing.
Prints, for each, the fastest and the median run of all_reduce over 2 processes, in nanoseconds.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile

COMPARE = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "bench/compare/compare.py")
SIZES = {4: "4 B", 1024: "1 KiB"}


def run(build, level):
    """Nanoseconds by size, medians over the blocks of one run; those with the two cores near."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [COMPARE, "--programs", f"{build}/bench", "--min", "4", "--max", "1KiB",
             "--factor", "256", "--blocks", "5", "--block-ms", "20", "--json", file.name],
            env=dict(os.environ, LOCKSTEP_CHECK=level), stdout=subprocess.DEVNULL, check=True)
        rows = json.load(file)["rows"]
    return {row["bytes"]: row["p50_us"] * 1000 for row in rows if row.get("placement") == "near"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("others", nargs="*", metavar="NAME=BUILD")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    candidates = {level: (arguments.build, level) for level in ("off", "light", "full")}
    for other in arguments.others:
        name, build = other.split("=", 1)
        candidates[name] = (build, "light")
    times = {(name, size): [] for name in candidates for size in SIZES}
    for _ in range(arguments.rounds):
        for name in random.sample(list(candidates), len(candidates)):
            for size, nanoseconds in run(*candidates[name]).items():
                times[name, size].append(nanoseconds)
    print(f"{'':12}" + "".join(f"{text + ', ' + what:>18}" for text in SIZES.values()
                               for what in ("fastest", "median")))
    for name in candidates:
        if not all(times[name, size] for size in SIZES):
            sys.exit("never were the two cores near each other")
        print(f"{name:12}" + "".join(f"{value:18.0f}" for size in SIZES
                                     for value in (min(times[name, size]),
                                                   statistics.median(times[name, size]))))


if __name__ == "__main__":
    main()
