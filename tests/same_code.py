"""Compares the machine code of two builds, to prove that a renaming changed nothing.

    python3 tests/same_code.py BEFORE AFTER [--only TEXT] [--sass]

BEFORE and AFTER are build folders. Objects are paired by their path in the folder, functions of the
host by their instructions: names, addresses and the order of functions do not count; what a
function calls, and the constants that it reads, do. Prints a line per object, then the functions
without a partner.
The exit status is 0 if there are none. --only: objects whose path contains TEXT.

--sass: GPU kernels instead, of two libraries or of all objects of two folders, paired by
architecture, code, registers, stack and shared memory. Says how many have a partner, and registers,
stack and spills of those that have none. Needs NVIDIA's cuobjdump and nvdisasm.
"""
from __future__ import annotations

import argparse
import bisect
import collections
import hashlib
import pathlib
import re
import struct
import subprocess
import sys
from typing import Counter, Dict, List, NamedTuple, Tuple, Union

import gpu_code

ROUNDS = 4  # a function is told apart by its callees, and theirs, so many levels down


class Target(NamedTuple):
    """What an instruction refers to: `offset` bytes behind the start of a function."""

    function: str
    offset: int


Instruction = Tuple[Union[str, Target], ...]
Functions = Dict[str, List[Instruction]]


class Section(NamedTuple):
    name: str
    is_code: bool
    is_text: bool  # of strings that end with a zero
    entry: int  # bytes of an entry of a section of constants; 0: entries differ
    data: bytes


class Object:
    """Sections and symbols of a relocatable ELF file of 64 bits."""

    def __init__(self, path: pathlib.Path) -> None:
        raw = path.read_bytes()
        if raw[:5] != b"\x7fELF\x02":
            raise SystemExit(f"{path}: not an ELF file of 64 bits")
        (start,) = struct.unpack_from("<Q", raw, 0x28)
        count, names = struct.unpack_from("<HH", raw, 0x3c)
        headers = [struct.unpack_from("<IIQQQQIIQQ", raw, start + 64 * n) for n in range(count)]

        def text(table: int, offset: int) -> str:
            begin = headers[table][4] + offset
            return raw[begin:raw.index(b"\0", begin)].decode()

        self.sections: List[Section] = []
        self.symbols: Dict[str, Tuple[int, int]] = {}  # section and offset
        for name, kind, flags, _, offset, size, *_, entry in headers:
            has_bits = kind not in (0, 8)  # SHT_NULL, SHT_NOBITS
            self.sections.append(Section(
                text(names, name), is_code=bool(flags & 4), is_text=bool(flags & 0x20),
                entry=entry if flags & 0x10 else 0,
                data=raw[offset:offset + size] if has_bits else b""))
        self.by_name = {section.name: n for n, section in enumerate(self.sections)}
        starts: Dict[int, Dict[int, str]] = collections.defaultdict(dict)
        self.variables: Dict[int, List[Tuple[int, int]]] = collections.defaultdict(list)
        indexed: List[Tuple[int, int]] = []  # section and offset of every symbol
        for _, kind, _, _, offset, size, link, *_ in headers:
            for at in range(offset, offset + size, 24) if kind == 2 else ():  # SHT_SYMTAB
                name, info, _, section, value, bytes_ = struct.unpack_from("<IBBHQQ", raw, at)
                indexed.append((section, value))
                if section == 0 or section >= count or not name:
                    continue
                self.symbols[text(link, name)] = (section, value)
                if info & 15 == 1:  # STT_OBJECT
                    self.variables[section].append((value, bytes_))
                if info & 15 == 2:  # STT_FUNC
                    starts[section].setdefault(value, text(link, name))
        self.functions = {section: sorted(all_.items()) for section, all_ in starts.items()}
        # What relocations of a section put there: section and offset.
        self.pointers: Dict[int, Dict[int, Tuple[int, int]]] = collections.defaultdict(dict)
        for _, kind, _, _, offset, size, _, info, *_ in headers:
            for at in range(offset, offset + size, 24) if kind == 4 else ():  # SHT_RELA
                where, symbol, addend = struct.unpack_from("<QQq", raw, at)
                section, value = indexed[symbol >> 32]
                self.pointers[info][where] = (section, value + addend)

    def function_at(self, section: int, offset: int) -> Target:
        all_ = self.functions.get(section, [])
        n = bisect.bisect_right(all_, (offset, "\x7f")) - 1
        if n < 0:
            return Target(self.sections[section].name, offset)
        return Target(all_[n][1], offset - all_[n][0])

    def meaning(self, symbol: str, offset: int) -> Union[str, Target]:
        """Of a symbol and bytes behind it: a function, a constant's bytes, or another library's."""
        if symbol not in self.symbols and symbol not in self.by_name:
            # Functions of this library may have got another name.
            return "ours" if "flashattn" in symbol else f"{symbol}+{offset}"
        section, start = self.symbols.get(symbol, (self.by_name.get(symbol, 0), 0))
        offset += start
        found = self.sections[section]
        if found.is_code:
            return self.function_at(section, offset)
        if found.is_text:
            return found.data[offset:].split(b"\0")[0].decode(errors="replace")
        if found.entry:
            return found.data[offset:offset + found.entry].hex()
        for start, size in self.variables[section]:
            if start <= offset < start + size:
                return f"{found.data[start:start + size].hex()}+{offset - start}"
        return found.name if offset not in self.pointers[section] else self.jumps(section, offset)

    def jumps(self, section: int, table: int) -> str:
        """A table of jumps inside one function: 4 bytes each, relative to the table."""
        targets: List[Target] = []
        pointers = self.pointers[section]
        for at in range(table, len(self.sections[section].data), 4):
            if at not in pointers:
                break
            target = self.function_at(pointers[at][0], pointers[at][1] - (at - table))
            if targets and target.function != targets[0].function:
                break
            targets.append(target)
        return "jumps to " + " ".join(str(target.offset) for target in targets)


def host_functions(path: pathlib.Path) -> Functions:
    """The functions of an object file for the host, by name."""
    item = Object(path)
    shown = subprocess.run(["objdump", "-drw", "--no-show-raw-insn", str(path)], check=True,
                           capture_output=True, text=True).stdout
    functions: Functions = {}
    section = 0
    body: List[Instruction] = []
    lines: List[Tuple[int, str]] = []  # address, -1: no instruction, and the rest
    for line in shown.splitlines():
        m = re.match(r"\s+([0-9a-f]+):\t(.*)", line)
        lines.append((int(m[1], 16), m[2]) if m else (-1, line))
    for n, (address, line) in enumerate(lines):
        if address < 0:
            if m := re.match(r"Disassembly of section (.*):$", line):
                section = item.by_name[m[1]]
            elif m := re.match(r"[0-9a-f]+ <(.*)>:$", line):
                body = functions.setdefault(m[1], [])
            continue
        text, *relocations = line.split("\t")
        after = lines[n + 1][0] if n + 1 < len(lines) else -1
        parts: List[Union[str, Target]] = []
        for where, kind, rest in zip(*[iter(re.split(r": |\t", "\t".join(relocations)))] * 3):
            m = re.match(r"(.*?)([-+]0x[0-9a-f]+)?$", rest)
            assert m
            offset = int(m[2] or "0", 16)
            # Relative to the instruction's end, which is where the next one begins.
            if "PC" in kind or "PLT" in kind:
                offset += after - int(where, 16) if after > 0 else 4
            parts += [kind, item.meaning(m[1], offset)]
        text = text.partition("#")[0]
        if m := re.search(r"\b([0-9a-f]+) <.*>", text):
            if not relocations:
                parts.append(item.function_at(section, int(m[1], 16)))
            text = text[:m.start()]
        body.append((text.strip(), *parts))
    return {name: without_padding(body) for name, body in functions.items() if body}


def without_padding(body: List[Instruction]) -> List[Instruction]:
    """Less what only aligns the next function."""
    end = len(body)
    while end and re.match(r"(data16|cs |nop|xchg +%ax,%ax|int3)", str(body[end - 1][0])):
        end -= 1
    return body[:end]


def digests(functions: Functions) -> Tuple[Dict[str, str], Dict[str, str]]:
    """Of every function: of its own instructions, and with those of what it calls."""
    own: Dict[str, str] = {}
    known: Dict[str, str] = {}
    for _ in range(ROUNDS):
        now = {}
        for name, body in functions.items():
            digest = hashlib.sha256()
            for instruction in body:
                for part in instruction:
                    if isinstance(part, Target):
                        callee = "self" if part.function == name else known.get(part.function, "")
                        part = f"{callee}+{part.offset:x}"
                    digest.update(part.encode() + b"\n")
            now[name] = digest.hexdigest()
        own, known = own or now, now
    return own, known


def compare(before: Functions, after: Functions) -> List[str]:
    """A line for every function that has no partner on the other side."""
    (own_a, all_a), (own_b, all_b) = digests(before), digests(after)
    lines = []
    for mark, mine, own, other, theirs in (("-", all_a, own_a, all_b, own_b),
                                           ("+", all_b, own_b, all_a, own_a)):
        left: Counter[str] = collections.Counter(other.values())
        lone = []
        for name, digest in sorted(mine.items()):
            left[digest] -= 1
            if left[digest] < 0:
                lone.append(name)
        alike = set(theirs.values())
        sizes = before if mark == "-" else after
        for name, clear in zip(lone, gpu_code.demangled(lone)):
            why = f"{len(sizes[name])} instructions"
            if own[name] in alike:
                why = "what it calls differs"
            lines.append(f"  {mark} {clear} ({why})")
    return lines


def objects(folder: pathlib.Path, only: str) -> Dict[str, pathlib.Path]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.o")}
    return {name: path for name, path in found.items() if only in name}


def compare_kernels(before: pathlib.Path, after: pathlib.Path, only: str) -> int:
    """Prints what same_code.py --sass says; how many kernels have no partner."""
    tool = gpu_code.cuobjdump()
    found = []
    for side in (before, after):
        files = [side] if side.is_file() else sorted(objects(side, only).values())
        found.append([kernel for path in files for kernel in gpu_code.kernels(path, tool)])
        if not found[-1]:
            raise SystemExit(f"{side}: no GPU code" + f" in an object whose path contains {only}"
                             * side.is_dir())
        print(gpu_code.totals(str(side), found[-1]))
    same, lines = gpu_code.compare(*found)
    print("\n".join([f"{same} kernels are the same, {len(lines)} differ", *lines]))
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--only", default="src/", metavar="TEXT")
    parser.add_argument("--sass", action="store_true", help="the GPU's code")
    given = parser.parse_args()
    if given.sass:
        return 1 if compare_kernels(given.before, given.after, given.only) else 0
    before, after = (objects(folder, given.only) for folder in (given.before, given.after))
    if not before or not after:
        parser.error(f"no object whose path contains {given.only} in one of the folders")
    different = 0
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            print(f"{name}: only {'before' if name in before else 'after'}")
            different += 1
            continue
        old, new = host_functions(before[name]), host_functions(after[name])
        lines = compare(old, new)
        total = sum(map(len, new.values()))
        print(f"{name}: {len(new)} functions, {total} instructions, {len(lines)} without a partner")
        print("\n".join(lines), end="\n" if lines else "")
        different += len(lines)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
