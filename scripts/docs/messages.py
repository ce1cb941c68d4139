#!/usr/bin/env python3
"""scripts/docs/messages.py: every message of the tables of docs/failures.md that say "the message begins with" is in the sources.

A message is the code in the first cell of a row. What varies in it is `...`, or one capital letter."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ("the message begins with", "the line says", "the line of the late rank")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_CHANGES = re.compile(r"\.\.\.|\b[A-Z]\b|\{[^{}]*\}")


def texts_of(source: str) -> str:
    """The string literals of a source file, adjacent ones joined, each on a line."""
    joined = re.sub(r'"\s*\n\s*"', "", source)
    return "\n".join(found[1].replace('\\"', '"') for found in _LITERAL.finditer(joined))


def messages(page: str) -> Iterator[str]:
    is_listed = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if not line.startswith("|"):
            is_listed = False
        elif cells[1] in HEADINGS:
            is_listed = True
        elif is_listed:
            yield from re.findall(r"`([^`]+)`", cells[1])


def main() -> int:
    sources = [path for path in (ROOT / "src").rglob("*.[ch]pp")]
    literals = "\n".join(texts_of(path.read_text()) for path in sources)
    # As the page writes them: what varies is a gap.
    known = re.sub(r"\s+", " ", _CHANGES.sub("\0", literals))
    errors = []
    found = list(messages((ROOT / "docs/failures.md").read_text()))
    for message in found:
        parts = [part.strip() for part in _CHANGES.split(message)]
        errors += [f"docs/failures.md: no source says '{part}' of '{message}'" for part in parts if part and part not in known]
    print("\n".join(errors), end="\n" if errors else "")
    return bool(errors) or len(found) < 20


if __name__ == "__main__":
    sys.exit(main())
