#!/usr/bin/env python3
"""scripts/docs/check_reference.py SITE: every public name is in the reference of the built site.

The names are those that ctags finds in the public headers, which reads them without doxygen, and `__all__` of the
Python package. A name is there if an element of a reference page has it as its id."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import links

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = re.compile(r"(^|::)(detail|internal|torch|std|__anon\w*)(::|$)")
KINDS = set("class struct enum enumerator prototype function typedef alias variable member macro".split())


def names_of_headers() -> dict[str, str]:
    """The names, with the file and line of each: Class.member, or name."""
    headers = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "include/lockstep").rglob("*.h*"))
        if "detail" not in path.parts
    ]
    command = "ctags --output-format=json --fields=+aneKsZ --extras= --kinds-C++=+p --kinds-C=+p -f - --langmap=C:.h".split()
    command += ["--langmap=C++:.hpp", "-I", "LOCKSTEP_API", "-D", "TORCH_ARG(T,name)=T name", "-D", "TORCH_MODULE(name)=", *headers]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tags = [json.loads(line) for line in output.splitlines()]
    functions = tuple(
        f"{tag.get('scope', '')}::{tag['name']}" for tag in tags if tag["kind"] in ("function", "prototype")
    )
    private = {f"{tag.get('scope', '')}::{tag['name']}" for tag in tags if tag.get("access", "public") != "public"}
    found = {}
    for tag in tags:
        name, scope, kind = tag["name"], tag.get("scope", ""), tag["kind"]
        if (
            kind not in KINDS
            or tag.get("access", "public") != "public"
            or scope.startswith(functions)
            or scope in private
            or "= delete;" in tag.get("pattern", "")
            or INTERNAL.search(scope)
            or INTERNAL.search(name)
        ):
            continue
        if name.startswith(("~", "operator", "__anon")) or name.endswith(("_", "_H", "_API")):
            continue
        owner = re.sub(r"^lockstep(::nn)?(::|$)", "", scope) if tag.get("scopeKind") != "enum" else ""
        key = f"{owner.replace('::', '.')}.{name}" if owner else name
        if kind == "enumerator":
            key = "enumerator " + name
        found[key] = f"{tag['path']}:{tag['line']}"
    return found


def main() -> int:
    site = Path(sys.argv[1])
    ids: set[str] = set()
    text = ""
    for page in (site / "reference").rglob("*.html"):
        html = page.read_text()
        ids |= set(re.findall(r'\bid="([^"]+)"', html))
        text += re.sub(r"<[^>]+>", "", html)
    words = set(re.findall(r"\w+", text))
    expected = names_of_headers()
    for module, file in links.PYTHON_MODULES.items():
        for name in links.public_names(ROOT / "python/lockstep" / file):
            if name != "errors":  # a module; its classes are names of lockstep
                expected[f"{module}.{name}"] = f"python/lockstep/{file}"
    missing = [
        f"{place}: {name} is not in the reference"
        for name, place in expected.items()
        if (name.split(" ")[1] not in words if name.startswith("enumerator ") else name not in ids)
    ]
    print("\n".join([*missing, f"reference: {len(expected)} public names, {len(missing)} missing"]))
    return bool(missing) or len(expected) < 300


if __name__ == "__main__":
    sys.exit(main())
