"""What the site has beyond docs/: README.md as its first page, the examples, the files that pages link, and the
C++ and C reference. A hook of MkDocs: scripts/docs/mkdocs.yml."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, os.path.dirname(__file__))
import links
import reference

ROOT = Path(__file__).resolve().parents[2]
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "bench/README.md": "benchmarks.md"}
_LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".py": "python", ".sh": "bash", ".txt": "cmake", ".c": "c", ".rs": "rust"}


def page_of(path: str) -> str:
    """The page that shows this file or folder of the repository."""
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("include/lockstep/"):
        return reference.page_of(path.removeprefix("include/"))
    if (ROOT / path).is_dir():
        return page_of(f"{path}/README.md") if (ROOT / path / "README.md").exists() else f"source/{path}.md"
    return _PAGES.get(path, path if path.endswith(".md") else f"source/{path}.md")


def on_files(files: Files, config: Any) -> Files:
    sources = {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    waiting = ["README.md", "CHANGELOG.md", *sources]
    seen = set(waiting)
    while waiting:  # what they link, and what that links
        path = waiting.pop()
        if path not in sources:
            level = InclusionLevel.NOT_IN_NAV if page_of(path).startswith("source/") else InclusionLevel.UNDEFINED
            files.append(File.generated(config, page_of(path), content=_content(path), inclusion=level))
        if path.endswith(".md"):
            linked = {target for target in links.targets(ROOT, path) if not _has_page(target)}
            waiting += linked - seen
            seen |= linked
    for path in sorted(ROOT.glob("examples/*/README.md")):
        if str(path.relative_to(ROOT)) not in seen:
            files.append(File.generated(config, str(path.relative_to(ROOT)), content=path.read_text()))
    pages = reference.pages(ROOT / "build/docs/xml", ROOT / "include")
    pages["reference/python.md"] = _python()
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    files.append(File.generated(config, "site.css", abs_src_path=str(Path(__file__).with_name("site.css"))))
    config.nav = list(
        _expanded(config.nav, [file.src_uri for file in files.documentation_pages()], set(_named(config.nav)))
    )
    return files


def _has_page(path: str) -> bool:
    return path.startswith(("docs/", "include/lockstep/")) and (ROOT / path).is_file()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository become links to the pages that show them."""
    path = next((source for source, uri in _PAGES.items() if uri == page.file.src_uri), None)
    if path is None:
        path = page.file.src_uri if page.file.src_uri.startswith("examples/") else f"docs/{page.file.src_uri}"
    if page.file.src_uri.startswith(("source/", "reference/")):
        return markdown

    def relink(target: str) -> str:
        name, hash_, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return target
        repository_path = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if not (ROOT / repository_path).exists():
            return target  # MkDocs reports it
        shown = page_of(repository_path)
        return posixpath.relpath(shown, posixpath.dirname(page.file.src_uri) or ".") + hash_ + anchor

    return _blocks_apart(links.map_targets(markdown, relink))


def _blocks_apart(markdown: str) -> str:
    """A list or table may follow a line of text at once; Python's Markdown wants an empty line between."""
    lines: list[str] = []
    is_code, before = False, ""
    for line in markdown.split("\n"):
        starts = (line.startswith("- ") and not before.startswith(("- ", "  "))) or (
            line.startswith("|") and not before.startswith("|")
        )
        if starts and before.strip() and not is_code:
            lines.append("")
        if line.lstrip().startswith("```"):
            is_code = not is_code
        lines.append(line)
        before = line
    return "\n".join(lines)


def _content(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.is_file())
        pages = [
            (name, posixpath.relpath(page_of(f"{path}/{name}"), posixpath.dirname(page_of(path))))
            for name in names
            if name.endswith(".md")
        ]
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({link})" for name, link in pages) + "\n"
    if path.endswith(".md"):
        return file.read_text()
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def _python() -> str:
    lines = ["# Python: lockstep\n", "::: lockstep\n    options:\n      members: false\n"]
    for module, file in links.PYTHON_MODULES.items():
        if module != "lockstep":
            lines.append(f"# Python: {module}\n\n::: {module}\n    options:\n      members: false\n")
        for name in links.public_names(ROOT / "python" / "lockstep" / file):
            if name != "errors":
                lines.append(
                    f"::: {module}.{name}\n    options:\n      show_root_heading: true\n"
                    "      show_root_toc_entry: true\n      show_root_full_path: false\n"
                )
    return "\n".join(lines)


def _named(nav: Any) -> Iterator[str]:
    for item in nav.values() if isinstance(nav, dict) else nav:
        if isinstance(item, str):
            yield item
        else:
            yield from _named(item)


def _expanded(nav: list[Any], uris: list[str], named: set[str]) -> Iterator[Any]:
    def matching(pattern: str) -> list[str]:
        found = [uri for uri in uris if fnmatch.fnmatch(uri, pattern) and uri not in named]
        if "/" not in pattern.removesuffix("/*"):
            found = [uri for uri in found if uri.count("/") == 1 or pattern == "examples/*"]
        return sorted(found, key=lambda uri: (not uri.endswith(("README.md", "index.md")), uri))

    for item in nav:
        if isinstance(item, str):
            yield from matching(item) if item.endswith("*") else [item]
            continue
        ((title, value),) = item.items()
        if isinstance(value, list):
            yield {title: list(_expanded(value, uris, named))}
        elif value.endswith("*"):
            if matching(value):
                yield {title: matching(value)}
        else:
            yield item
