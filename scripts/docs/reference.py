"""The C++ and C reference: reads doxygen's XML and the headers' order, and makes one page per header.

A page shows the header's declarations in their order, each with its comment. A declaration without a comment
of its own, directly below another, belongs to the comment above, as a reader of the header takes it.
"""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

# Inline elements of doxygen's text, and what surrounds them in Markdown.
_MARKS = {"computeroutput": "`", "emphasis": "*", "bold": "**"}
# Overloads that exist to explain a mistake at compile time are not shown.
_EXPLAINS = re.compile(r"\bNo[A-Z]\w+|&&\s*\)|&&\s*,|\) *const *&&|&&\.\.\.\)|\(&\)\[N\]")


@dataclass
class Entry:
    """One declaration."""

    name: str
    kind: str
    code: str
    text: str
    line: int
    last_line: int
    members: list[Entry] = field(default_factory=list)


def pages(xml: Path, include: Path) -> dict[str, str]:
    """Markdown by the path of its page, for every public header."""
    found: dict[str, list[Entry]] = {}
    for path in sorted(xml.glob("*.xml")):
        compound = ET.parse(path).getroot().find("compounddef")
        if compound is None:
            continue
        if compound.get("kind") == "namespace" and compound.findtext("compoundname", "").startswith("lockstep"):
            _add_members(compound, found)
        elif path.name == "lockstep_8h.xml":
            _add_members(compound, found)
        elif compound.get("kind") in ("class", "struct", "concept"):
            if compound.get("prot", "public") == "public" and compound.findtext("compoundname", "").startswith(
                "lockstep::"
            ):
                entry = _class(compound)
                if entry:
                    found.setdefault(compound.find("location").get("file"), []).append(entry)
    _format([member for entries in found.values() for entry in entries for member in (entry, *entry.members)])
    result = {}
    for path in (include / "lockstep").rglob("*.hpp"):
        header = str(path.relative_to(include))
        if "detail" not in header and _intro(xml, header):
            found.setdefault(header, [])  # the comment of the file says all
    for header, entries in found.items():
        entries = sorted((e for e in entries), key=lambda e: e.line)
        name = page_of(header)
        result[name] = _page(header, entries, _intro(xml, header), (include / header).read_text().splitlines())
    result["reference/index.md"] = _index(found)
    return result


def page_of(header: str) -> str:
    stem = header.removeprefix("lockstep/")
    return "reference/c.md" if stem == "lockstep.h" else f"reference/{stem.replace('.hpp', '.md')}"


def _add_members(compound: ET.Element, found: dict[str, list[Entry]]) -> None:
    """Names of a namespace within lockstep or lockstep::nn have its name before them."""
    namespace = re.sub(r"^lockstep(::nn)?(::|$)", "", compound.findtext("compoundname", ""))
    is_within = compound.get("kind") == "namespace" and namespace != ""
    for member in compound.iter("memberdef"):
        entry = _member(member)
        if entry:
            entry.name = f"{namespace.replace('::', '.')}.{entry.name}" if is_within else entry.name
            found.setdefault(member.find("location").get("file"), []).append(entry)


def _class(compound: ET.Element) -> Entry | None:
    name = re.sub(r"^lockstep::(nn::)?", "", compound.findtext("compoundname", "")).replace("::", ".")
    location = compound.find("location")
    if "::detail" in compound.findtext("compoundname", "") or location.get("file", "").startswith("lockstep/detail"):
        return None
    if compound.get("kind") == "concept":
        code = re.sub(r"\blockstep::(nn::)?", "", "".join(compound.find("initializer").itertext())).strip() + ";"
        code = re.sub(r"^template<", "template <", re.sub(r"(?<==) +", " ", code))
    else:
        bases = ", ".join(
            f"{base.get('prot')} {''.join(base.itertext())}"
            for base in compound.findall("basecompoundref")
            if "detail::" not in "".join(base.itertext())
        )
        code = f"{_template(compound)}{compound.get('kind')} {name.replace('.', '::')}{' : ' + bases if bases else ''};"
    entry = Entry(
        name, compound.get("kind"), code, _text_of(compound), int(location.get("line")), int(location.get("line"))
    )
    for section in compound.findall("sectiondef"):
        if section.get("kind", "").startswith("public") or section.get("kind") == "user-defined":
            entry.members += filter(None, map(_member, section.findall("memberdef")))
    entry.members.sort(key=lambda member: member.line)
    return entry


def _member(member: ET.Element) -> Entry | None:
    name, kind = member.findtext("name", ""), member.get("kind", "")
    arguments, text = member.findtext("argsstring", ""), _text_of(member)
    if (
        member.get("prot") != "public"
        or kind == "friend"
        or "=delete" in arguments
        or name.startswith("@")
        or name.endswith("_API")
    ):
        return None
    if kind == "function" and not text and (name.startswith("~") or _EXPLAINS.search(_template(member) + arguments)):
        return None
    location = member.find("location")
    line = int(location.get("line"))
    last = int(location.get("bodyend") or -1)
    value = "".join(member.find("initializer").itertext()) if member.find("initializer") is not None else ""
    result = "".join(member.find("type").itertext()) if member.find("type") is not None else ""
    if kind == "define":
        parameters = [p.findtext("defname", "") for p in member.findall("param")]
        code = f"#define {name}{'(' + ', '.join(parameters) + ')' if parameters else ''} {value}".rstrip()
    elif kind == "enum":
        code = _enum(member, name)
    elif kind == "typedef":
        definition = member.findtext("definition", "")
        if definition.startswith(f"typedef enum {name}"):
            return None
        code = f"using {name} = {result};" if definition.startswith("using") else f"{definition};"
    elif kind == "variable":
        code = f"{_template(member)}{result} {name}{' ' + value if value.startswith('=') else value};"
    else:
        before = "explicit " if member.get("explicit") == "yes" else ""
        if member.get("static") == "yes":
            before += "static "
        if member.get("virt") in ("virtual", "pure-virtual"):
            before += "virtual "
        result = re.sub(r"\b(static|virtual|inline|explicit) ", "", result)
        code = f"{_template(member)}{before}{result} {name}{arguments};"
    return Entry(name, kind, code, text, line, max(last, line))


def _enum(member: ET.Element, name: str) -> str:
    lines = []
    for value in member.findall("enumvalue"):
        text = " ".join("".join(value.find("briefdescription").itertext()).split()) or " ".join(
            "".join(value.find("detaileddescription").itertext()).split()
        )
        number = " ".join(value.findtext("initializer", "").split())
        lines.append(f"  {value.findtext('name')}{' ' + number if number else ''},{'  // ' + text if text else ''}")
    strong = "enum class" if member.get("strong") == "yes" else "enum"
    return f"{strong} {name} {{\n" + "\n".join(lines) + "\n};"


def _template(element: ET.Element) -> str:
    parameters = element.find("templateparamlist")
    if parameters is None:
        return ""
    names = [
        " ".join(filter(None, ["".join(p.find("type").itertext()), p.findtext("declname")]))
        for p in parameters.findall("param")
    ]
    requires = element.find("requiresclause")
    return f"template <{', '.join(names)}>\n" + (
        f"requires {''.join(requires.itertext())}\n" if requires is not None else ""
    )


def _format(entries: list[Entry]) -> None:
    """clang-format breaks long declarations; enums keep their comments, concepts and macros their lines."""
    formatted = [entry for entry in entries if entry.kind in ("function", "variable", "typedef", "class", "struct")]
    text = "\n".join(f"//@{i}\n{entry.code}" for i, entry in enumerate(formatted))
    style = "{BasedOnStyle: Google, ColumnLimit: 80, PointerAlignment: Left, AllowShortFunctionsOnASingleLine: None}"
    text = re.sub(r"\s+([&*]+)(?=\w|\))", r"\1 ", text)
    text = subprocess.run(
        ["clang-format-14", f"--style={style}", "--assume-filename=x.hpp"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for part in text.split("//@")[1:]:
        number, code = part.split("\n", 1)
        formatted[int(number)].code = code.strip()


# --- text ------------------------------------------------------------------------------------------


def _text_of(element: ET.Element) -> str:
    parts = [
        _blocks(element.find(tag))
        for tag in ("briefdescription", "detaileddescription")
        if element.find(tag) is not None
    ]
    return "\n\n".join(part for part in parts if part)


def _blocks(element: ET.Element, indent: str = "") -> str:
    return "\n\n".join(filter(None, (_block(child, indent) for child in element)))


def _block(element: ET.Element, indent: str) -> str:
    if element.tag == "itemizedlist":
        return "\n".join(f"{indent}- {_blocks(item, indent + '    ').lstrip()}" for item in element)
    if element.tag in ("programlisting", "verbatim"):
        return _code_block(element, indent)
    if element.tag != "para":
        raise ValueError(f"doxygen's element <{element.tag}> is not known to {__file__}: add it")
    blocks, inline = [], element.text or ""
    for child in element:
        if child.tag in ("itemizedlist", "programlisting", "verbatim"):
            blocks += [_line(inline, indent), _block(child, indent)]
            inline = ""
        else:
            inline += _inline(child)
        inline += child.tail or ""
    return "\n\n".join(filter(None, [*blocks, _line(inline, indent)]))


def _line(text: str, indent: str) -> str:
    text = " ".join(text.split())
    return indent + text if text else ""


def _code_block(element: ET.Element, indent: str) -> str:
    if element.tag == "verbatim":
        lines = (element.text or "").rstrip().splitlines()
    else:
        lines = []
        for line in element.findall("codeline"):
            text = ""
            for part in line.iter():
                text += " " if part.tag == "sp" else part.text or ""
                text += part.tail or "" if part is not line else ""
            lines.append(text)
    return "\n".join(indent + line for line in ["```cpp", *lines, "```"])


def _inline(element: ET.Element) -> str:
    content = (element.text or "") + "".join(_inline(child) + (child.tail or "") for child in element)
    if element.tag in _MARKS:
        return _MARKS[element.tag] + content + _MARKS[element.tag]
    if element.tag == "ulink":
        return f"<{element.get('url')}>"
    if element.tag in ("ref", "ndash", "mdash", "linebreak", "zwj"):
        # zwj: doxygen puts it between the characters of a "*/" in the comment.
        return {"ndash": "--", "mdash": "---", "linebreak": " ", "zwj": ""}.get(element.tag, content)
    raise ValueError(f"doxygen's element <{element.tag}> is not known to {__file__}: add it")


def _escaped(text: str) -> str:
    """Markdown that shows <- and <header> as they are; code stays."""
    parts = re.split(r"(```.*?```|`[^`]*`|<https?:[^>]*>)", text, flags=re.S)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\\)[<]", "&lt;", parts[i]).replace("[", "\\[").replace("_", "\\_")
        parts[i] = re.sub(r"\*(?!\*)(?=\s)", "\\*", parts[i])
    return "".join(parts)


# --- pages -----------------------------------------------------------------------------------------


def _intro(xml: Path, header: str) -> str:
    for path in xml.glob("*.xml"):
        compound = ET.parse(path).getroot().find("compounddef")
        if compound is not None and compound.get("kind") == "file" and compound.find("location").get("file") == header:
            return _text_of(compound)
    return ""


def _blocks_of(entries: list[Entry], source: list[str]) -> list[list[Entry]]:
    """Entries that share a comment."""
    blocks: list[list[Entry]] = []
    for entry in entries:
        before = blocks[-1][-1] if blocks else None
        is_below = before is not None and not any(
            not line.strip() for line in source[before.last_line : entry.line - 1]
        )
        if before is not None and not entry.text and is_below and not entry.members and not before.members:
            blocks[-1].append(entry)
        else:
            blocks.append([entry])
    return blocks


def _shown(block: list[Entry], language: str, source: list[str]) -> str:
    """The declarations; a comment behind one (///<) stays there, the others follow."""
    code, texts = "", []
    for entry in block:
        is_behind = "///<" in source[entry.line - 1] or "/**<" in source[entry.line - 1]
        if entry.text and not is_behind:
            texts.append(_escaped(entry.text))
        if entry.code not in code:
            code += entry.code + (f"  // {entry.text}" if entry.text and is_behind else "") + "\n"
    code, text = code.rstrip(), "\n\n".join(texts)
    return f"```{language}\n{code}\n```\n\n{text}\n"


def _plain_comment(lines: list[str]) -> str:
    """The comment that follows a section's heading, if it is about the section."""
    text = "\n".join(lines).lstrip()
    return " ".join(text[2 : text.index("*/")].replace("\n *", " ").split()) if text.startswith("/* ") else ""


def _item(text: str) -> str:
    return _escaped(text).replace("\n", "\n    ")


def _page(header: str, entries: list[Entry], intro: str, source: list[str]) -> str:
    is_c = header.endswith(".h")
    language = "c" if is_c else "cpp"
    title = "C interface: lockstep.h" if is_c else header.removeprefix("lockstep/")
    lines = [f"# {title}\n", f"`#include <{header}>`\n", _escaped(intro) + "\n"]
    used: dict[str, int] = {}

    def anchor(name: str) -> str:
        used[name] = used.get(name, 0) + 1
        return name if used[name] == 1 else f"{name}-{used[name]}"

    sections = [(i + 1, m.group(1)) for i, line in enumerate(source) if (m := re.match(r"/\* --- (.*?) -+ \*/", line))]
    for block in _blocks_of(entries, source):
        while is_c and sections and sections[0][0] < block[0].line:
            line, heading = sections.pop(0)
            lines += [f"## {heading.capitalize()}\n", _escaped(_plain_comment(source[line:])) + "\n"]
        names = list(dict.fromkeys(entry.name for entry in block))
        anchors = [anchor(name) for name in names]
        extra = "".join(f'<a id="{each}"></a>' for each in anchors[1:])
        lines.append(
            f"{'###' if is_c else '##'} {', '.join(names).replace('_', chr(92) + '_')} {{ #{anchors[0]} }}\n\n{extra}\n"
        )
        lines.append(_shown(block, language, source))
        fields = [entry for entry in block[0].members if entry.kind == "variable"]
        for entry in fields:
            mark = f'<a id="{anchor(f"{names[0]}.{entry.name}")}"></a>'
            lines.append(f"- {mark}`{entry.code.rstrip(';')}`{': ' if entry.text else ''}{_item(entry.text)}")
        lines.append("")
        for member_block in _blocks_of([entry for entry in block[0].members if entry not in fields], source):
            ids = [anchor(f"{names[0]}.{entry.name}") for entry in member_block]
            marks = "".join(f'<a id="{each}"></a>' for each in ids)
            lines.append(
                f'<div class="member" markdown>\n{marks}\n\n{_shown(member_block, language, source)}\n</div>\n'
            )
    return "\n".join(lines)


def _index(found: dict[str, list[Entry]]) -> str:
    places: dict[str, dict[str, str]] = {}
    for header, entries in found.items():
        page = page_of(header).removeprefix("reference/")
        for entry in entries:
            places.setdefault(entry.name, {})[header.removeprefix("lockstep/")] = f"{page}#{entry.name}"
    lines = [
        "# Every name of the C++ and C interfaces\n",
        "`#include <lockstep/lockstep.hpp>` is the core, `<lockstep/nn.hpp>` the libtorch layer, `<lockstep/lockstep.h>` the",
        "C interface. The Python package has [a page of its own](python.md).\n",
    ]
    for name, headers in sorted(places.items(), key=lambda item: (item[0].lower(), item[0])):
        lines.append(f"- `{name}`: {', '.join(f'[{header}]({link})' for header, link in sorted(headers.items()))}")
    return "\n".join(lines) + "\n"
