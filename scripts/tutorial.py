#!/usr/bin/env python3
"""Keeps README.md, docs/tutorial and examples/README.md true.

    scripts/tutorial.py check        code in them is that of the files they name
    scripts/tutorial.py update       copies it from there
    scripts/tutorial.py run [--junit FILE] BUILD [PAGE ...]
                                     their commands print what they show; BUILD has tests/consumer

A comment right before a block of code says what it is:

    <!-- file: examples/tutorial/hello.cpp -->           the whole file
    <!-- file: examples/tutorial/train.cpp#loop -->      its lines between two comments "[loop]"

Blocks of `console` are run: each line that begins with "$ " by bash, in the folder where the programs of the page
were built, or in the one of a comment "in: FOLDER"; a comment "needs: COMMAND" skips the block if COMMAND fails.
Each line shown must be printed, in any order, and nothing else, unless a line is "..."; a line indented by six
spaces continues the one before. Numbers that change from run to run (pids, times, memory) are ignored. A command
that ends in "&" runs until the end of its block; the pid in its line "[1] PID" stands for its own in the other
commands, which are repeated until they print what is shown.
"""

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import tests

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorial").glob("*.md")), ROOT / "examples/README.md"]
CHECKED = [*PAGES, ROOT / "docs/howto/elastic.md"]  # their code is that of files; only that of PAGES is run
MAX_LINES = 150
WATCHDOG_S = 120

Block = collections.namedtuple("Block", "page line language text comments")


def blocks_of(page):
    found, comments, fence = [], {}, None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        comment = re.fullmatch(r"<!-- (file|in|needs): (.*) -->", line)
        if fence is None and comment:
            comments[comment[1]] = comment[2]
        elif fence is None and line.startswith("```"):
            fence = Block(page.relative_to(ROOT), number, line[3:].strip(), [], comments)
        elif fence is not None and line == "```":
            found.append(fence)
            fence, comments = None, {}
        elif fence is not None:
            fence.text.append(line)
        else:
            comments = {}
    return found


def lines_of(name):
    """Of a file, without the marks of its sections, or of a section of it: path#section."""
    path, _, section = name.partition("#")
    lines = (ROOT / path).read_text().splitlines()
    is_mark = re.compile(r"\s*(//|#) \[(\w+)\]$").match
    if not section:
        return [line for line in lines if not is_mark(line)]
    marks = [i for i, line in enumerate(lines) if (mark := is_mark(line)) and mark[2] == section]
    if len(marks) != 2:
        raise ValueError(f"{path} has {len(marks)} comments [{section}] instead of 2")
    inside = [line for line in lines[marks[0] + 1 : marks[1]] if not is_mark(line)]
    return textwrap.dedent("\n".join(inside)).splitlines()


def check():
    complaints, run = [], ""
    for page in CHECKED:
        n_lines = len(page.read_text().splitlines())
        if n_lines >= MAX_LINES and page in PAGES:
            complaints.append(f"{page.relative_to(ROOT)} has {n_lines} lines, and shall have less than {MAX_LINES}")
        for block in blocks_of(page):
            at = f"{block.page}:{block.line}"
            if block.language == "console" and page in PAGES:
                run += "\n".join(block.text) + "\n"
            if "file" in block.comments:
                try:
                    if block.text != lines_of(block.comments["file"]):
                        complaints.append(f"{at}: differs from {block.comments['file']}")
                except (OSError, ValueError) as error:
                    complaints.append(f"{at}: {error}")
            elif block.language in ("cpp", "cmake", "python") and "tutorial" in block.page.parts:
                complaints.append(f"{at}: does not say which file it is from (<!-- file: ... -->)")
    for folder in "tutorial", "features":
        for program in sorted((ROOT / "examples" / folder).glob("*.cpp")):
            if f"./{program.stem}" not in run:
                complaints.append(f"{program.relative_to(ROOT)}: no page runs it")
    print("\n".join(complaints) or f"{len(CHECKED)} pages agree with their files")
    return not complaints


def update():
    for page in CHECKED:
        text = page.read_text()
        page.write_text(re.sub(r"(<!-- file: (\S+) -->\n```\w+\n).*?\n```$",
                               lambda block: block[1] + "\n".join([*lines_of(block[2]), "```"]),
                               text, flags=re.DOTALL | re.MULTILINE))
    return check()


VARYING = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
    (r"\b(pid|job|CONT) \d+", r"\1 PID"),
    (r"rank \d+ waited", "rank R waited"),  # whose limit passed first
    (r"\d+(\.\d+)? ?(ns|us|ms|s|MB|kB|%)(?!\w)", "N"),
    (r"^ *(\d+) +\d+ +[a-z]+ +N +N +\d+ +[\d.]+ \w*B/s ", r"\1 "),  # a line of `lockstep top`
    (r"\s+", " "),
]


def comparable(line):
    for pattern, text in VARYING:
        line = re.sub(pattern, text, line)
    return line.strip()


def difference(shown, printed):
    """What is wrong, or an empty string."""
    expected = collections.Counter(comparable(line) for line in shown if line.strip() not in ("...", ""))
    got = collections.Counter(comparable(line) for line in printed.splitlines() if line.strip())
    wrong = [f"  missing:   {line}" for line in (expected - got).elements()]
    if "..." not in (line.strip() for line in shown):
        wrong += [f"  not shown: {line}" for line in (got - expected).elements()]
    return "\n".join(wrong)


def start(command, folder, output):
    return subprocess.Popen(["bash", "-c", command], cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                            stderr=subprocess.STDOUT, start_new_session=True, text=True)


def end(process, signal_number):
    try:
        os.killpg(process.pid, signal_number)
    except ProcessLookupError:
        pass
    return process.communicate()[0]


def run_once(command, folder):
    process = start(command, folder, subprocess.PIPE)
    try:
        return process.communicate(timeout=WATCHDOG_S)[0], process.returncode
    except subprocess.TimeoutExpired:
        return end(process, signal.SIGKILL), "none: it did not end"


def run_block(block, folder):
    """What is wrong, or an empty string."""
    commands = []
    for line in block.text:
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif line.startswith(" " * 6):
            commands[-1][1][-1] += line
        else:
            commands[-1][1].append(line)
    background, pids = [], {}
    try:
        for command, shown in commands:
            for shown_pid, process in pids.items():
                command = command.replace(shown_pid, str(process.pid))
            if command.endswith("&"):
                background.append(start("exec " + command[:-1], folder, subprocess.DEVNULL))
                pids.update((line.split()[1], background[-1]) for line in shown if line.startswith("["))
                continue
            until = time.monotonic() + WATCHDOG_S
            while True:
                printed, code = run_once(command, folder)
                wrong = difference(shown, printed) + (f"\n  exit code: {code}" if code != 0 else "")
                if not wrong or not background or time.monotonic() > until:
                    break
                time.sleep(0.1)
            if wrong:
                return f"$ {command}\n{wrong}\n  printed:\n{textwrap.indent(printed, '    ')}"
    finally:
        for process in background:
            end(process, signal.SIGTERM)
    return ""


def run(build, pages, junit):
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                      OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")
    blocks = []
    for page in pages:
        programs = build / ("features" if page.parent.name == "examples" else "tutorial")
        for block in blocks_of(page):
            if block.language != "console":
                continue
            at = f"{block.page}:{block.line}"
            needs = block.comments.get("needs")
            folder = ROOT / block.comments["in"] if "in" in block.comments else programs
            if needs and run_once(needs, folder)[1] != 0:
                blocks.append(tests.Test(at, "skipped", needs))
                print(f"SKIPPED {at}: {needs}")
                continue
            began = time.monotonic()
            wrong = run_block(block, folder)
            blocks.append(tests.Test(at, "failed" if wrong else "passed", wrong, time.monotonic() - began))
            print(f"{'FAILED' if wrong else 'passed'} {at} ({time.monotonic() - began:.1f} s)\n{wrong}".rstrip(), flush=True)
    if junit:
        tests.write_junit(junit, blocks)
    outcomes = {block.outcome for block in blocks}
    return "passed" in outcomes and "failed" not in outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("update")
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--junit", type=Path)
    run_parser.add_argument("build", type=Path)
    run_parser.add_argument("page", type=Path, nargs="*")
    arguments = parser.parse_args()
    match arguments.command:
        case "check":
            is_right = check()
        case "update":
            is_right = update()
        case "run":
            is_right = run(arguments.build.resolve(), [page.resolve() for page in arguments.page] or PAGES, arguments.junit)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
