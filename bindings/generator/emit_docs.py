"""The reference pages of bindings/docs, in MyST's Markdown: functions, structures, enumerations.

Each name is a heading with a label of its own, to which every mention of it on the site leads. The
pages are written when the site is built, and are not committed.
"""
from __future__ import annotations

import re
from typing import Callable, Dict, List, Sequence, Tuple

from .model import CType, Enum, Field, Function, Model, Struct

# Names of C in a comment; a word of a formula, "cu_seqlens", is none of them.
NAME = re.compile(r"\b(?:flashattn|FLASHATTN)_\w+")
TERM = re.compile(r"(\w+(?:, \w+)*) {2,}(?=\S)")  # "plan   out: to be freed by ..."


def labels(model: Model) -> Dict[str, str]:
    """The label of each name of the header; an enumerator is found at its enumeration."""
    found = {item.name: item.name for kind in (model.enums, model.structs, model.callbacks,
                                               model.functions) for item in kind}
    found.update({member.name: enum.name for enum in model.enums for member in enum.members})
    found.update({name: "flashattn_plan_create" for name in model.opaque})
    return found


def link(text: str, known: Dict[str, str]) -> str:
    """Text of a comment as Markdown, with links at names."""
    def target(match: "re.Match[str]") -> str:
        name = match.group()
        shown = name.replace("_", r"\_")
        return f"[{shown}](project:#{known[name]})" if name in known else shown

    escaped: List[str] = []
    last = 0
    for match in NAME.finditer(text):
        escaped += [_escaped(text[last:match.start()]), target(match)]
        last = match.end()
    return "".join(escaped) + _escaped(text[last:])


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|$~^])", r"\\\1", text)


def prose(text: str, known: Dict[str, str], terms: Callable[[str], bool] = lambda _: True) -> str:
    """A comment as Markdown: what is indented is a list of terms, where it starts with one that
    terms() accepts, or else a formula."""
    blocks: List[Tuple[str, List[str]]] = []
    for line in text.split("\n"):
        term = TERM.match(line.strip())
        indented = line.startswith("  ")
        if not line:
            blocks.append(("", []))
        elif indented and term and terms(term.group(1)) and not line.startswith("     "):
            blocks.append(("term", [line.strip()]))
        elif indented and blocks and blocks[-1][0] == "term":
            blocks[-1][1].append(line.strip())
        elif blocks and blocks[-1][0] == ("formula" if indented else "text"):
            blocks[-1][1].append(line)
        else:
            blocks.append(("formula" if indented else "text", [line]))
    parts = [_block(kind, lines, known) for kind, lines in blocks if lines]
    return "\n\n".join(parts)


def _block(kind: str, lines: Sequence[str], known: Dict[str, str]) -> str:
    if kind == "formula":
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        return "```text\n" + "\n".join(line[indent:] for line in lines) + "\n```"
    text = " ".join(lines)
    if kind == "text":
        return link(text, known)
    name, _, meaning = re.split(r"( {2,})", text, maxsplit=1)
    return f"- `{name}`: {link(meaning, known)}"


def declaration(ctype: CType, name: str = "") -> str:
    """`const float *const *part_lse`, as C writes it."""
    text = ("const " if ctype.pointee_const[:1] == (True,) else "") + ctype.base
    for depth in range(len(ctype.pointee_const)):
        outer = ctype.pointee_const[depth + 1:depth + 2]
        text += (" " if depth == 0 else "") + "*" + ("const " if outer == (True,) else "")
    text += ("" if text.endswith(("*", " ")) or not name else " ") + name
    return text + (f"[{ctype.length}]" if ctype.length else "")


def emit_functions(model: Model) -> str:
    """Conventions, functions by section, and the types of callbacks."""
    known = labels(model)
    parts = ["# Functions", "Written from `include/flashattn.h` when this site was built, version "
             f"{'.'.join(map(str, model.version))}.", "## Conventions",
             prose(model.conventions, known)]
    section = ""
    for function in model.functions:
        if function.section != section:
            section = function.section
            parts += [f"## {section}", prose(model.sections.get(section, ""), known)]
        parts.append(_function(function, known))
    parts.append("## Callbacks")
    parts += [_function(callback, known, "typedef {}(*{})({});") for callback in model.callbacks]
    return "\n\n".join(filter(None, parts)) + "\n"


def _function(function: Function, known: Dict[str, str], form: str = "{}{}({});") -> str:
    names = {parameter.name for parameter in function.parameters}
    result = declaration(function.result)
    parameters = [declaration(p.type, p.name) for p in function.parameters] or ["void"]
    whole = form.format(result + ("" if result.endswith("*") else " "), function.name,
                        ", ".join(parameters))
    if len(whole) > 80:
        whole = whole.replace(", ", ",\n    ").replace(f"{function.name}(",
                                                        f"{function.name}(\n    ", 1)
        whole = whole.replace(f"{function.name})(", f"{function.name})(\n    ", 1)
    text = prose(function.doc, known, lambda term: bool(names & set(term.split(", "))))
    return f"({function.name})=\n### {function.name}\n\n```c\n{whole}\n```\n\n{text}"


def emit_structs(model: Model) -> str:
    known = labels(model)
    parts = ["# Structures", "Written from `include/flashattn.h` when this site was built. Every "
             "default is 0. Sizes are those of this version; `struct_size` says which one a "
             "program was compiled with."]
    return "\n\n".join(parts + [_struct(struct, known) for struct in model.structs]) + "\n"


def _struct(struct: Struct, known: Dict[str, str]) -> str:
    rows = ["| Member | Type | Meaning |", "|---|---|---|"]
    for field, doc in zip(struct.fields, _docs(struct.fields)):
        kind = declaration(CType(field.type.base, field.type.pointee_const, field.type.length))
        kind = f"[{_escaped(kind)}](project:#{known[field.type.base]})" \
            if field.type.base in known else f"`{kind}`"
        rows.append(f"| `{field.name}` | {kind} | {link(doc, known)} |")
    table = "\n".join(rows)
    return (f"({struct.name})=\n## {struct.name}\n\n{prose(struct.doc, known)}\n\n"
            f"{struct.size} bytes.\n\n{table}")


def _docs(fields: Sequence[Field]) -> List[str]:
    """A comment stands for the members below it that have none of their own, too."""
    docs: List[str] = []
    for field in fields:
        above = "Must be 0." if field.name == "reserved" else "As above." if docs else ""
        docs.append(" ".join(field.doc.split()) or above)
    return docs


def emit_enums(model: Model) -> str:
    """Enumerations; statuses and reasons as well, which the page on errors repeats with advice."""
    known = labels(model)
    parts = ["# Enumerations", "Written from `include/flashattn.h` when this site was built. "
             "Stored and passed as `int32_t`; those that are bits as `uint32_t`."]
    for enum in model.enums:
        parts.append(f"({enum.name})=\n## {enum.name}\n\n{prose(enum.doc, known)}\n\n"
                     + enum_table(enum, known))
    return "\n\n".join(parts) + "\n"


def enum_table(enum: Enum, known: Dict[str, str]) -> str:
    rows = ["| Name | Value | Meaning |", "|---|---|---|"]
    for member in enum.members:
        meaning = link(" ".join(member.doc.split()), known)
        rows.append(f"| `{member.name}` | {member.value} | {meaning} |")
    return "\n".join(rows)
