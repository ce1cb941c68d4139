#!/usr/bin/env python3
"""scripts/docs/prose.py [FILE ...]: what the Markdown files say and how they are set. No line of prose is longer than 130
characters, no phrase of scripts/docs/words.txt occurs, docs/design/README.md lists every design note, and a note begins with
question, answer and what was rejected."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from links import pages

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 130
FIRST_PAGE = 50  # lines
_FENCE = re.compile(r" *(`{3,}|~{3,})")
_ITEM = re.compile(r"\s*([-*+]|\d+\.) ")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


def prose(markdown: str) -> Iterator[tuple[int, str]]:
    """The lines, by number, that are no code."""
    fence = ""
    is_in_list = is_code = False
    above = ""
    for number, line in enumerate(markdown.splitlines(), start=1):
        mark = _FENCE.match(line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence:
            if _ITEM.match(line):
                is_in_list = True
            elif line and not line.startswith(" "):
                is_in_list = False
            # Four spaces behind an empty line begin code, but not in a list, whose items go on so.
            is_code = line.startswith("    ") and (is_code or not above) and not is_in_list or (is_code and not line)
            if not is_code:
                yield number, line
            above = line


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """What the pages do not say, with what they say instead."""
    lines = (ROOT / "scripts/docs/words.txt").read_text().splitlines()
    pairs = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    return [(re.compile(pattern, re.I), better) for pattern, better in pairs]


def complaints(path: str, words: list[tuple[re.Pattern[str], str]]) -> Iterator[str]:
    text = (ROOT / path).read_text()
    for number, line in prose(text):
        # What cannot be broken: a table, an image, HTML.
        if len(line) > LONGEST and not line.lstrip().startswith(("|", "![", "<")):
            yield f"{path}:{number}: {len(line)} characters, at most {LONGEST}"
    if path == "CHANGELOG.md":  # it has the words of its day
        return
    # Phrases that a line break divides too; code has the names that it has.
    whole = re.sub(r"\n *", " ", _CODE.sub(lambda code: " " * len(code[0]), "\n".join(line for _, line in prose(text))))
    for pattern, better in words:
        for found in pattern.finditer(whole):
            yield f"{path}: '{found[0].strip()}' in '{whole[max(0, found.start() - 30) : found.end() + 30]}': {better}"


def main() -> int:
    words = phrases()
    errors = [error for path in pages(ROOT) for error in complaints(path, words)]
    notes = (ROOT / "docs/design/README.md").read_text()
    for note in sorted((ROOT / "docs/design").glob("[0-9]*.md")):
        if f"]({note.name})" not in notes:
            errors.append(f"docs/design/README.md does not list {note.name}")
        page = "\n".join(note.read_text().splitlines()[:FIRST_PAGE])
        if not re.search(r"^\*\*Question.*^\*\*Answer.*^\*\*Rejected", page, re.M | re.S):
            errors.append(f"docs/design/{note.name} does not begin with **Question**, **Answer** and **Rejected**")
    print("\n".join(errors), end="\n" if errors else "")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
