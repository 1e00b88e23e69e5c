"""The machine code of GPU kernels, as NVIDIA's cuobjdump shows it: for same_code.py --sass, and for
what ptxas makes of the order in which a mainloop is written."""
from __future__ import annotations

import array
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple


class Kernel(NamedTuple):
    """A function of a binary for one architecture."""

    arch: str
    name: str  # mangled
    code: bytes  # the encoding of its instructions, without the loop that pads it
    registers: int
    stack: int  # bytes a thread: what does not fit the registers, and arrays indexed at run time
    shared: int  # bytes a CTA that the compiler knows of
    local: int  # instructions that load from or store to the stack

    @property
    def instructions(self) -> int:
        return len(self.code) // 16

    def __str__(self) -> str:
        return (f"{self.instructions} instructions, {self.registers} registers, {self.stack} bytes "
                f"of stack, {self.local} accesses to it")


def cuobjdump() -> str:
    """Beside the nvcc on PATH, or among NVIDIA's packages of this Python (./run installs them)."""
    nvcc = shutil.which("nvcc")
    folders = [pathlib.Path(nvcc).resolve().parent] if nvcc else []
    folders += pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")
    for folder in folders:
        if (folder / "cuobjdump").exists():
            return str(folder / "cuobjdump")
    raise SystemExit("no cuobjdump: put the CUDA Toolkit's nvcc on PATH, or install NVIDIA's "
                     "packages cuda-cuobjdump and cuda-nvdisasm (tests/requirements-cuda.txt)")


def shown(tool: str, option: str, path: pathlib.Path) -> Iterator[str]:
    """The lines of cuobjdump, which itself calls the nvdisasm beside it."""
    env = dict(os.environ, PATH=os.environ["PATH"] + os.pathsep + os.path.dirname(tool))
    with subprocess.Popen([tool, option, str(path)], stdout=subprocess.PIPE, text=True,
                          env=env) as process:
        assert process.stdout
        yield from process.stdout
    if process.returncode:
        raise SystemExit(f"{tool} {option} {path} failed with status {process.returncode}")


def resources(lines: Iterator[str]) -> Dict[Tuple[str, str], Dict[str, int]]:
    """By architecture and name: REG, STACK, SHARED, ..."""
    found: Dict[Tuple[str, str], Dict[str, int]] = {}
    arch = name = ""
    for line in lines:
        if m := re.match(r"arch = (\w+)", line):
            arch = m[1]
        elif m := re.match(r"\s*Function (\S+):$", line):
            name = m[1]
        elif name and "REG:" in line:
            found[arch, name] = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
            name = ""
    return found


def kernels(path: pathlib.Path, tool: str) -> List[Kernel]:
    """All of a library, an object or a cubin; none where it holds no GPU code."""
    used = resources(shown(tool, "-res-usage", path))
    found: List[Kernel] = []
    arch, name, local, code = "", "", 0, array.array("Q")

    def finish() -> None:
        if name:
            its = used.get((arch, name), {})
            found.append(Kernel(arch, name, without_padding(code.tobytes()), its.get("REG", 0),
                                its.get("STACK", 0), its.get("SHARED", 0), local))

    for line in shown(tool, "-sass", path):
        if m := re.search(r"/\* (0x[0-9a-f]{16}) \*/", line):
            code.append(int(m[1], 16))
            local += bool(re.search(r"\b(LDL|STL)\b", line))
        elif m := re.match(r"\s*Function : (\S+)", line):
            finish()
            name, local, code = m[1], 0, array.array("Q")
        elif m := re.match(r"\s*code for (\w+)", line):
            finish()
            arch, name = m[1], ""
    finish()
    return found


def sass(path: pathlib.Path, tool: str) -> Dict[str, List[Tuple[int, str]]]:
    """By kernel, its instructions without their predicates, with their addresses."""
    found: Dict[str, List[Tuple[int, str]]] = {}
    name = ""
    for line in shown(tool, "-sass", path):
        if m := re.match(r"\s*Function : (\S+)", line):
            name = m[1]
        m = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]*);", line)
        if m:
            found.setdefault(name, []).append((int(m[1], 16), m[2]))
    return found


def mainloops(path: pathlib.Path, tool: str) -> Dict[str, List[str]]:
    """By kernel of the Hopper forward pass: its mainloop, the shortest loop with WGMMAs and
    exponentials."""
    found: Dict[str, List[str]] = {}
    for name, code in sass(path, tool).items():
        for end, (address, text) in enumerate(code):
            target = re.match(r"BRA .*?(0x[0-9a-f]+)", text)
            if not target or int(target[1], 16) >= address:
                continue
            loop = [text for start, text in code[:end + 1] if start >= int(target[1], 16)]
            if any("HGMMA" in text for text in loop) and any("MUFU.EX2" in text for text in loop):
                found[name] = min(found.get(name, loop), loop, key=len)
    return found


def exps_before_pv(path: pathlib.Path, tool: str) -> Dict[str, int]:
    """By kernel: how many exponentials its mainloop issues before it waits for P V."""
    found = {}
    for name, loop in mainloops(path, tool).items():
        wait = next((n for n, text in enumerate(loop)
                     if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x0", text)), 0)
        found[name] = sum("MUFU.EX2" in text for text in loop[:wait])
    return found


def softmax_bases(path: pathlib.Path, tool: str) -> Dict[str, List[int]]:
    """By kernel: the registers that its mainloop subtracts from scores, as numbers."""
    found = {}
    for name, loop in mainloops(path, tool).items():
        matches = (re.match(r"FFMA .*, -R(\d+)(\.reuse)? *$", text) for text in loop)
        found[name] = sorted({int(match[1]) for match in matches if match})
    return found


def steps(path: pathlib.Path, tool: str) -> Dict[str, List[List[str]]]:
    """By kernel with exponentials: the instructions of each step of its mainloop, from its first
    exponential to its last."""
    found: Dict[str, List[List[str]]] = {}
    for name, code in sass(path, tool).items():
        exps = [n for n, (_, text) in enumerate(code) if "MUFU.EX2" in text]
        for last, n in zip([-1000, *exps], exps):
            if n - last > 300:
                found.setdefault(name, []).append([])
            else:
                found[name][-1] += [text for _, text in code[last:n]]
    return found


def without_padding(code: bytes) -> bytes:
    """Less the NOPs that fill up to the next function; they are all alike."""
    nop = 0x7918  # the lowest 16 bits of an instruction less its predicate
    end = len(code)
    while end >= 16 and int.from_bytes(code[end - 16:end - 14], "little") == nop:
        end -= 16
    return code[:end]


def difference(before: Kernel, after: Kernel) -> str:
    """How a kernel's code changed."""
    pairs = zip(*(memoryview(k.code).cast("Q") for k in (before, after)))
    first = next((n // 2 for n, (a, b) in enumerate(pairs) if a != b), None)
    where = "one is longer" if first is None else f"from instruction {first} on"
    if before.code == after.code:
        where = "the same instructions"
    return f"before {before}; after {after}; {where}"


def totals(name: str, found: Sequence[Kernel]) -> str:
    most = max((k.registers for k in found), default=0)
    spilling = [k for k in found if k.local]
    return (f"{name}: {len(found)} kernels, {sum(k.instructions for k in found)} instructions, "
            f"{most} registers at most, {len(spilling)} of them with "
            f"{sum(k.local for k in spilling)} accesses to the stack (spills)")


def compare(before: Sequence[Kernel], after: Sequence[Kernel]) -> Tuple[int, List[str]]:
    """How many kernels have a partner with the same architecture, code, registers, stack and shared
    memory, whatever its name; a line for every other one. Those of one name stand in one line."""
    def body(kernel: Kernel) -> Tuple[object, ...]:
        return kernel._replace(name="", local=0)

    unpaired = collections.Counter(map(body, after))
    lone: List[Kernel] = []
    for kernel in before:
        unpaired[body(kernel)] -= 1
        if unpaired[body(kernel)] < 0:
            lone.append(kernel)
    alike = collections.Counter(map(body, before))
    others: Dict[Tuple[str, str], List[Kernel]] = collections.defaultdict(list)
    for kernel, clear in zip(after, demangled([k.name for k in after])):
        alike[body(kernel)] -= 1
        if alike[body(kernel)] < 0:
            others[kernel.arch, clear].append(kernel)
    lines = []
    for kernel, clear in zip(lone, demangled([k.name for k in lone])):
        partner: Optional[Kernel] = None
        if others[kernel.arch, clear]:
            partner = others[kernel.arch, clear].pop(0)
        what = difference(kernel, partner) if partner else str(kernel)
        lines.append(f"  {'!' if partner else '-'} {kernel.arch} {clear} ({what})")
    lines += [f"  + {arch} {clear} ({kernel})" for (arch, clear), left in others.items()
              for kernel in left]
    return len(before) - len(lone), lines


def demangled(names: List[str]) -> List[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                          check=True)
    return done.stdout.splitlines()
