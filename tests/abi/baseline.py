#!/usr/bin/env python3
"""The promise of the ABI, written down: tests/abi/baseline.txt holds every exported symbol,
function, enumerator, structure and member with its place. A library's version may add to it and
change nothing: programs that were compiled before keep running.

    baseline.py [--library LIB]           compares the header (and a built library) with the file
    baseline.py --library LIB --write     writes the file anew; refused where something would break

Prints one sentence for each thing that a change breaks.
"""
from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASELINE = pathlib.Path(__file__).with_name("baseline.txt")
SKIPPED = 77

sys.path.insert(0, str(ROOT / "bindings"))
try:
    from generator.model import CType, Function, Model, read
except ImportError as missing:
    print(f"0 passed, 0 failed, 1 skipped: {missing.name} is not installed for {sys.executable}")
    sys.exit(SKIPPED)

Key = Tuple[str, ...]
REMEDY = "append instead, and leave what is there"


class Member(NamedTuple):
    offset: int
    size: int
    type: str


def spell(ctype: CType) -> str:
    """`const float *const *` without blanks, innermost first: float-const*-const*."""
    stars = "".join("-const*" if const else "*" for const in ctype.pointee_const)
    return ctype.base + stars + (f"[{ctype.length}]" if ctype.length else "")


def signature(function: Function) -> str:
    inner = ",".join(spell(p.type) for p in function.parameters)
    return f"{spell(function.result)}({inner or 'void'})"


def header_facts(model: Model) -> Dict[Key, str]:
    """What the header promises: key words to value words."""
    facts: Dict[Key, str] = {}
    for enum in model.enums:
        for item in enum.members:
            facts["enumerator", item.name] = str(item.value)
    for struct in model.structs:
        facts["struct", struct.name] = str(struct.size)
        for f in struct.fields:
            facts["member", struct.name, f.name] = f"{f.offset} {f.size} {spell(f.type)}"
    for name in model.opaque:
        facts["opaque", name] = "-"
    for function in model.callbacks:
        facts["callback", function.name] = signature(function)
    for function in model.functions:
        facts["function", function.name] = signature(function)
    return facts


def library_facts(path: str) -> Dict[Key, str]:
    """The symbols with their version, and the name under which programs ask for the library."""
    def tool(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    facts = {}
    for name, version in re.findall(r" [TDBRVW] (\w+)(?:@@?(\S+))?$",
                                    tool("nm", "-D", "--defined-only", path), re.M):
        facts["symbol", name] = version or "-"
    soname = re.search(r"SONAME.*\[(.*)\]", tool("readelf", "-d", path))
    facts["soname", "library"] = soname.group(1) if soname else "-"
    return facts


def load(text: str) -> Dict[Key, str]:
    facts = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            words = line.split()
            size = 3 if words[0] == "member" else 2
            facts[tuple(words[:size])] = " ".join(words[size:])
    return facts


def dump(facts: Dict[Key, str]) -> str:
    head = "# Written by tests/abi/baseline.py; it says what may change.\n"
    return head + "".join(" ".join(key) + f" {value}\n" for key, value in facts.items())


def member(value: str) -> Member:
    offset, size, ctype = value.split()
    return Member(int(offset), int(size), ctype)


def is_reserved(name: str) -> bool:
    return name.startswith("reserved")


# What a change of a fact without members breaks; {} {} {}: name, old value, new value.
BROKEN = {
    "enumerator": "{} was {} and is now {}: programs that were compiled before pass the old number",
    "opaque": "{} was opaque{} and is now {}: pointers to it change their meaning",
    "callback": "callback {} was {} and is now {}: programs hand over functions of the old type",
    "function": "{} was {} and is now {}: programs pass arguments the old way; add a new function",
    "symbol": "{} had the symbol version {} and now has {}: programs that were linked before do "
              "not start",
    "soname": "the {}'s name was {} and is now {}: programs that were linked before do not start",
}
GONE = {
    "enumerator": "{} is gone: sources that use it do not compile, and its number {} may be stored",
    "struct": "struct {} is gone: programs that use it do not compile",
    "opaque": "{} is gone: programs that use it do not compile",
    "callback": "callback {} is gone: programs that use it do not compile",
    "function": "{} is gone: programs that call it do not link",
    "symbol": "{} is no longer exported: programs that call it do not start",
    "soname": "the {} has no name any more",
}


def broken(old: Dict[Key, str], new: Dict[Key, str], with_library: bool) -> Iterator[str]:
    """One sentence for each thing of the old facts that the new ones break."""
    for key, value in old.items():
        kind, name, now = key[0], key[1], new.get(key)
        if not with_library and kind in ("symbol", "soname"):
            continue
        if kind == "struct" and now is not None:
            yield from broken_struct(name, old, new)
        elif kind == "member":
            yield from broken_member(key, value, now, new)
        elif now is None:
            yield GONE[kind].format(name, value)
        elif now != value:
            yield BROKEN[kind].format(name, value, now)


def broken_struct(name: str, old: Dict[Key, str], new: Dict[Key, str]) -> Iterator[str]:
    key = ("struct", name)
    before, now = int(old[key]), int(new[key])
    if now < before:
        yield (f"{name} shrank from {before} to {now} bytes: the library reads past what a new "
               f"program gives it, and refuses what an old one gives; {REMEDY}")
    if now > before and ("member", name, "struct_size") not in old:
        yield (f"{name} grew from {before} to {now} bytes but has no struct_size and lies inside "
               f"other structures: what follows it there moves; use its reserved words")
    places = [(member(v), k[2]) for k, v in old.items() if k[:2] == ("member", name)]
    for k, value in new.items():
        if k[:2] != ("member", name) or k in old:
            continue
        added = member(value)
        inside = [n for m, n in places if m.offset < added.offset + added.size
                  and added.offset < m.offset + m.size and not is_reserved(n)]
        if inside:
            yield (f"{name}.{k[2]} is new and lies where {name}.{inside[0]} was, byte "
                   f"{added.offset}: members may only be added at the end, or out of reserved "
                   f"words")


def broken_member(key: Key, value: str, now: Optional[str], new: Dict[Key, str]) -> Iterator[str]:
    struct, name = key[1:]
    if is_reserved(name) or ("struct", struct) not in new:
        return
    if now is None:
        yield (f"{struct}.{name} is gone: what programs that were compiled before write there "
               f"means something else now; {REMEDY}")
        return
    before, after = member(value), member(now)
    if after.offset != before.offset:
        yield (f"{struct}.{name} moved from byte {before.offset} to {after.offset}: programs that "
               f"were compiled before write to the old place; {REMEDY}")
    if (after.size, after.type) != (before.size, before.type):
        yield (f"{struct}.{name} was {before.type} of {before.size} bytes and is now {after.type} "
               f"of {after.size}: programs that were compiled before write the old one; {REMEDY}")


def not_recorded(old: Dict[Key, str], new: Dict[Key, str]) -> Iterator[str]:
    """What may be, but is not promised yet: a later change of it would pass unseen."""
    for key, value in new.items():
        grown = key[0] == "struct" and key in old and int(value) > int(old[key])
        if key not in old or grown:
            yield (f"{' '.join(key)} {value} is new, which breaks nothing; record it with "
                   f"tests/abi/baseline.py --library LIB --write")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="a built libflashattn.so")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    header = ROOT / "include" / "flashattn.h"
    new = header_facts(read(header.read_text(encoding="utf-8")))
    if options.library:
        new.update(library_facts(options.library))
    old = load(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    faults: List[str] = list(broken(old, new, bool(options.library)))
    if options.write and not options.library:
        parser.error("--write needs --library, whose symbols are part of the promise")
    if options.write and not faults:
        BASELINE.write_text(dump(new), encoding="utf-8")
    elif not options.write:
        faults += not_recorded(old, new)
    for sentence in faults:
        print(sentence)
    print(f"{max(len(old) - len(faults), 0)} passed, {len(faults)} failed, 0 skipped")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
