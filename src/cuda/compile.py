"""Compiles one .cu file, and fails where the assembler had to make do: a spill, a stack frame, a
serialised wgmma pipeline (ptxas C75xx); where nvcc's folder has cuobjdump, also an operand of a
wgmma that is written while it is read. Beside OUTPUT it leaves OUTPUT.memory: how many MB the
largest of its processes took. compile.py NVCC ARGUMENT... -o OUTPUT ..."""
import os
import re
import resource
import subprocess
import sys
from typing import List, Set

FAULTS = (
    (re.compile(r"(?<!\d)[1-9]\d* bytes stack frame"), "uses a stack frame"),
    (re.compile(r"(?<!\d)[1-9]\d* bytes spill"), "spills registers"),
    (re.compile(r"\bC75\d\d\b"), "loses its pipeline"),
)

# Instructions whose first register is not a result.
READERS = frozenset("""ACQBULK BAR BMOV BRA BREAK BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ERRBAR EXIT
    FENCE FSETP ISETP LDGDEPBAR LDGSTS MEMBAR NANOSLEEP NOP PLOP3 PREEXIT R2P R2UR RED REDG RET ST
    STG STL STS STSM SYNCS WARPSYNC YIELD""".split())


def registers(operand: str, count: int) -> Set[int]:
    """Those that begin with the one that an operand names."""
    named = re.match(r"R(\d+)", operand)
    return set(range(int(named[1]), int(named[1]) + count)) if named else set()


def overwritten(sass: str) -> List[str]:
    """Instructions, in the order in which they stand, that write a register which a wgmma under way
    reads. Neither ptxas nor the hardware says so, and the emulator has no registers. (A variable
    that is an operand or comes from memory, by a branch: the compiler loads over the operand.)"""
    found: List[str] = []
    groups: List[Set[int]] = []  # operands, of each group that has been committed
    last: Set[int] = set()
    for line in sass.split("\n"):
        if "Function :" in line:
            groups, last = [], set()
        match = re.match(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\d\s+)?(\S+)\s*([^;]*);", line)
        if not match:
            continue
        address, name, rest = match.groups()
        base, operands = name.split(".")[0], [text.strip() for text in rest.split(",")]
        if base == "HGMMA":
            last |= registers(operands[1], 4)
            if "gsb0" in rest:
                groups, last = groups + [last], set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands[1], 16)
            groups = groups[-left:] if left else []
        elif base not in READERS and not base.startswith(("U", "WARPGROUP")):
            wide = re.search(r"\.(128|MT?88\.4)", name)
            count = 4 if wide else 2 if re.search(r"\.64|WIDE|CS2R|88\.2", name) else 1
            if registers(operands[0], count) & last.union(*groups):
                found.append(f"{address}: {name} {rest.strip()}")
    return found


def disassembled(nvcc: str, output: str) -> str:
    """What nvcc's own cuobjdump makes of an object; nothing where there is none."""
    folder = os.path.dirname(os.path.realpath(nvcc))
    tool = os.path.join(folder, "cuobjdump")
    if not os.access(tool, os.X_OK):
        return ""
    done = subprocess.run([tool, "-sass", output], capture_output=True, text=True,
                          env={**os.environ, "PATH": os.environ["PATH"] + os.pathsep + folder})
    if done.returncode:
        print(f"compile.py: operands were not looked at: {done.stderr}", file=sys.stderr)
    return done.stdout


def main() -> int:
    done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode:
        print(report, file=sys.stderr)
        return done.returncode
    kernel, faults = "?", []
    for line in report.split("\n"):
        named = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line)
        if named:
            kernel = f"{named[1]} ({named[2]})"
        faults += [f"{kernel} {what}: {line.strip()}" for pattern, what in FAULTS
                   if pattern.search(line)]
        if "warning" in line:
            print(line, file=sys.stderr)
    output = sys.argv[sys.argv.index("-o") + 1]
    if any("sm_90a" in argument for argument in sys.argv):
        faults += [f"{output} writes an operand of a wgmma under way: {instruction}"
                   for instruction in overwritten(disassembled(sys.argv[1], output))]
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    with open(output + ".memory", "w", encoding="ascii") as out:
        out.write(f"{taken:.0f}\n")
    for fault in faults:
        print(f"compile.py: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
