#!/usr/bin/env python3
"""scripts/docs/links.py [FILE ...]: every relative link and anchor of the Markdown files leads somewhere.

Also what the site needs to know of them: their links, and the names that a Python module makes public."""

from __future__ import annotations

import ast
import posixpath
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_LINK = re.compile(r"(\]\(<?)([^)\s>]+)(>?(?:\s+\"[^\"]*\")?\))|(<(?:img|a)\b[^>]*?\b(?:src|href)=\")([^\"]+)(\")")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1[`~]*\s*?$", re.S | re.M)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)

# Those that the reference has, and their files in python/lockstep.
PYTHON_MODULES = {
    "lockstep": "__init__.py",
    "lockstep.nn": "nn.py",
    "lockstep.mmengine": "mmengine.py",
    "lockstep.sync_batchnorm": "sync_batchnorm.py",
    "lockstep.torchft": "torchft.py",
}


def map_targets(markdown: str, change: Callable[[str], str]) -> str:
    """The text with the target of each link, not those in code, changed."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match.group())
        return f"\0{len(kept) - 1}\0"

    text = _CODE.sub(keep, _FENCE.sub(keep, markdown))
    text = _LINK.sub(
        lambda m: m[1] + change(m[2]) + m[3] if m[1] else m[4] + change(m[5]) + m[6],
        text,
    )
    while "\0" in text:
        text = re.sub(r"\0(\d+)\0", lambda m: kept[int(m[1])], text)
    return text


def targets(root: Path, path: str) -> set[str]:
    """Files and folders of the repository that the file links."""
    found: set[str] = set()

    def look(target: str) -> str:
        name = target.partition("#")[0]
        if name and not re.match(r"[a-z]+:", name):
            found.add(posixpath.normpath(posixpath.join(posixpath.dirname(path), name)))
        return target

    map_targets((root / path).read_text(), look)
    return {name for name in found if (root / name).exists()}


def anchors(markdown: str) -> set[str]:
    """As GitHub and the site make them of headings; also those of <a id>."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", markdown))
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", markdown), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def public_names(module: Path) -> list[str]:
    """A Python module's __all__."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def broken(root: Path, path: str) -> Iterator[str]:
    found: list[str] = []
    map_targets((root / path).read_text(), lambda target: found.append(target) or target)
    for target in found:
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", name):
            continue
        other = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
        if not (root / other).exists():
            yield f"{path}: {target}: {other} does not exist"
        elif anchor and other.endswith(".md") and anchor not in anchors((root / other).read_text()):
            yield f"{path}: {target}: {other} has no heading #{anchor}"


def pages(root: Path) -> list[str]:
    """Those that the command line names, else all Markdown files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return sys.argv[1:] or listed.stdout.split()


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    errors = [error for path in pages(root) for error in broken(root, path)]
    print("\n".join(errors), end="\n" if errors else "")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
