#!/usr/bin/env python3
"""Runs tests with CTest and reports on them, for ./dev test. RESULTS is a folder of JUnit files: one for each binary, and
what pytest and the tutorial write.

run RESULTS NAME BUILD N [BINARY...]  all tests of BUILD, or the shards of these binaries with GTEST_FILTER, N at once
show RESULTS NAME CODE LOG            what RESULTS/NAME.xml says: one line, and failed tests with their output. What made
                                      it ended with CODE, and has written LOG
note RESULTS failed|skipped TEXT      of something that runs no tests, as what does not compile
close RESULTS TITLE                   skipped tests with their reasons, failed ones, counts; exit code 1 if one failed
badge RESULTS VERSION FILE            a picture (SVG) of the version, how many tests passed, and on what
"""

import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple

LIMIT_S = os.environ.get("LOCKSTEP_TEST_LIMIT", "1500")  # of a shard
FEWER_RANKS = re.compile(r"of \d+ ranks or more")  # SKIP_UNLESS_RANKS
WHOLE = str(1 << 30)  # bytes of a shard's output
MOST_LINES, MOST_CHARACTERS = 300, 30_000  # of the output of a failed test


class Test(NamedTuple):
    name: str
    outcome: str  # passed, failed, skipped
    text: str = ""  # the reason of a skip, the output of a failure
    seconds: float = 0


def end_of(lines):
    return "\n".join(lines[-MOST_LINES:])[-MOST_CHARACTERS:]


def tests_of_shard(how, output):
    """Of GoogleTest's output. how: what CTest says of a shard that failed, else empty. What is wrong with the process
    is one more failed test."""
    tests, running, own, closing = [], "", [], ""
    for line in output.splitlines():
        ended = re.fullmatch(r"\[ +(OK|FAILED|SKIPPED) +\] (.*) \((\d+) ms\)", line)
        if line.startswith("[ RUN      ] "):
            running, own = line[13:], []
        elif running and ended:
            outcome = {"OK": "passed"}.get(ended[1], ended[1].lower())
            said = end_of(own)
            if outcome == "skipped":
                said = " ".join(part for part in own if part.strip() and not part.endswith(": Skipped"))
            tests.append(Test(ended[2], outcome, said, int(ended[3]) / 1e3))
            running, own = "", []
        elif line.startswith("[==========] ") and line.endswith("ms total)"):
            closing, own = line, []
        else:
            own.append(line)
    wrong = ""
    if not closing:
        wrong = f"ended ({how}) inside {running or next((line for line in reversed(own) if line.strip()), 'its start')}"
    elif int(closing.split()[1]) != len(tests):
        wrong = f"says that it ran {closing.split()[1]} tests, but reported on {len(tests)}"
    elif how and all(test.outcome != "failed" for test in tests):
        wrong = f"ended ({how}) after its tests"
    return [*tests, Test(wrong, "failed", end_of(own))] if wrong else tests


def run(results, name, build, n, *binaries):
    out, log = (Path(results) / f"{name}.{suffix}" for suffix in ("ctest", "log"))
    command = ["ctest", "--test-dir", build, "-j", n, "--timeout", LIMIT_S, "--output-junit", str(out.absolute())]
    command += ["--test-output-size-passed", WHOLE, "--test-output-size-failed", WHOLE]
    if binaries:
        command += ["-R", f"^({'|'.join(binaries)})\\."]
    with open(log, "w") as file:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    # How a test ended, which CTest's JUnit file lacks.
    ended = re.findall(r"Test +#\d+: (\S+) \.*(.*?)\*\*\*(.*?):? +[\d.]+ sec", log.read_text(errors="replace"))
    how_ended = {test: f"{before} {after}".strip() for test, before, after in ended}
    found = {binary: [] for binary in binaries or [name]}
    for case in ET.parse(out).getroot().iter("testcase"):
        test, output = case.get("name"), case.findtext("system-out") or ""
        how = "" if case.get("status") == "run" else how_ended.get(test, "failed")
        if binaries:
            found[test.rpartition(".")[0]] += tests_of_shard(how, output)
        else:
            found[name].append(Test(test, "failed" if how else "passed", end_of([*output.splitlines(), how]), float(case.get("time"))))
    chooses = not re.match(r"\*?(-|$)", os.environ.get("GTEST_FILTER", ""))
    for binary, tests in found.items():
        write_junit(Path(results) / f"{binary}.xml", tests if tests or chooses else [Test("ran no test", "failed")])
        show(results, binary)


def tests_of(path):
    for case in ET.parse(path).getroot().iter("testcase") if path.exists() else []:
        name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
        seconds = float(case.get("time") or 0)
        for tag, outcome in ("failure", "failed"), ("error", "failed"), ("skipped", "skipped"):
            if (found := case.find(tag)) is not None:
                said = [found.text or "", found.get("message") or ""]  # pytest's traceback, and the reason of a skip
                yield Test(name, outcome, said[outcome == "skipped"] or said[outcome != "skipped"], seconds)
                break
        else:
            yield Test(name, "passed", "", seconds)


def write_junit(path, tests):
    suite = ET.Element("testsuite")
    for test in tests:
        case = ET.SubElement(suite, "testcase", name=test.name, time=str(test.seconds))
        if test.outcome != "passed":
            text = re.sub("[^\\t\\n\\r -\\ud7ff\\ue000-\\ufffd]", "?", test.text)  # what XML may have
            ET.SubElement(case, "failure" if test.outcome == "failed" else "skipped", message=text)
    ET.ElementTree(suite).write(path)


def show(results, name, code="0", log=""):
    path = Path(results) / f"{name}.xml"
    tests = list(tests_of(path))
    n, seconds = Counter(test.outcome for test in tests), sum(test.seconds for test in tests)
    if path.exists():
        print(f"  {name:12} {n['passed']:5} passed {n['failed']:3} failed {n['skipped']:3} skipped {seconds:6.0f} s", flush=True)
    for test in tests:
        if test.outcome == "failed":
            print(f"{name}: {test.name}\n{test.text}\nFAILED: {name}: {test.name}", flush=True)
    if code != "0" and not n["failed"]:
        print("\n".join(Path(log).read_text(errors="replace").splitlines()[-100:]), flush=True)
        note(results, "failed", f"{name} ended with exit code {code}: {log}")


def note(results, outcome, text):
    write_junit(Path(results) / f"note-{len(list(Path(results).iterdir()))}.xml", [Test(text, outcome)])
    print(f"{outcome.upper()}: {text}", flush=True)


def all_tests(results):
    return [(path.stem, test) for path in sorted(Path(results).glob("*.xml")) for test in tests_of(path)]


def close(results, title):
    tests = all_tests(results)
    if not tests:
        tests = [("note", Test("no test ran", "failed"))]
    n = Counter(test.outcome for _, test in tests)
    n_fewer = 0
    for outcome in "skipped", "failed":
        if n[outcome]:
            print(f"\n== {outcome.upper()}:")
        for binary, test in tests:
            if test.outcome != outcome:
                continue
            if outcome == "skipped" and FEWER_RANKS.search(test.text):
                n_fewer += 1
                continue
            where = "" if binary.startswith("note") else f"{binary}: "
            reason = f": {test.text}" if outcome == "skipped" and test.text else ""
            print(f"  {where}{test.name}{reason}")
        if outcome == "skipped" and n_fewer:
            print(f"  of tests that need more ranks than their instance has: {n_fewer}")
    print(f"\n{title}{n['passed']} passed, {n['failed']} failed, {n['skipped']} skipped")
    return n["failed"] > 0


def badge(results, version, file):
    n_passed = sum(test.outcome == "passed" for _, test in all_tests(results))
    system = platform.freedesktop_os_release()
    x, parts = 0, []
    for name, value in (
        ("version", version),
        ("tests", f"{n_passed:,} passed"),
        ("platform", f"{system['ID'].capitalize()} {system['VERSION_ID']}, {platform.machine()}"),
    ):
        for text, colour in (name, "#555"), (value, "#2a7f3f"):
            width = 7 * len(text) + 12  # of a character of this font, and margins
            parts.append(f'<rect x="{x}" width="{width}" height="20" fill="{colour}"/>')
            parts.append(f'<text x="{x + width / 2}" y="14" textLength="{7 * len(text)}">{text}</text>')
            x += width
        x += 6
    style = 'font-family="DejaVu Sans,Verdana,sans-serif" font-size="11" fill="#fff" text-anchor="middle"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - 6}" height="20" role="img" {style}>'
    Path(file).write_text("\n".join([head, *parts, "</svg>", ""]))


if __name__ == "__main__":
    commands = {"run": run, "show": show, "note": note, "close": close, "badge": badge}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
