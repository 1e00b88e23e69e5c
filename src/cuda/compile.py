"""Compiles one .cu file. Fails if ptxas reports a spill, a stack frame or a serialised pipeline
of wgmma (C75xx), or if an operand of a wgmma is written while it is read, for which it needs the
cuobjdump beside nvcc. Machine code for GPUs after Hopper may come from the PTX of several
architectures: that of the first from which no kernel spills is taken. Writes OUTPUT.memory: the MB
that the largest compiler process took.
compile.py NVCC ARGUMENT... -o OUTPUT ..."""
import os
import re
import resource
import subprocess
import sys
from typing import Dict, FrozenSet, Iterator, List, NamedTuple, Set, Tuple

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


class Instruction(NamedTuple):
    address: int
    conditional: bool
    name: str
    operands: List[str]

    def writes(self) -> Set[int]:
        """Registers, all that it may."""
        base = self.name.split(".")[0]
        if base in READERS or base.startswith(("U", "WARPGROUP", "HGMMA", "QGMMA")):
            return set()
        wide = re.search(r"\.(128|MT?88\.4)", self.name)
        count = 4 if wide else 2 if re.search(r"\.64|WIDE|CS2R|88\.2", self.name) else 1
        return registers(self.operands[0], count)


def functions(sass: str) -> Iterator[List[Instruction]]:
    """The instructions of each function of a listing."""
    for text in sass.split("Function :")[1:]:
        found = []
        for line in text.split("\n"):
            match = re.match(r"\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\d\s+)?(\S+)\s*([^;]*);", line)
            if match:
                address, predicate, name, rest = match.groups()
                operands = [operand.strip() for operand in rest.split(",")]
                found.append(Instruction(int(address, 16), bool(predicate), name, operands))
        yield found


def successors(function: List[Instruction]) -> List[List[int]]:
    """Which instructions may follow each, by number; after a branch by a register, none."""
    number = {f"0x{instruction.address:x}": n for n, instruction in enumerate(function)}
    meets: Dict[str, str] = {}  # where those who wait at a barrier go on
    follow = []
    for n, (_, conditional, name, operands) in enumerate(function):
        base, target = name.split(".")[0], ""
        falls = conditional  # through to the next
        if base == "BRA":
            target = operands[-1]
            falls = conditional or len(operands) > 1
        elif base == "BSYNC":
            target = meets.get(operands[0], "")
        elif base not in ("BRX", "BRXU", "EXIT", "RET"):
            falls = True
        if base == "BSSY":
            meets[operands[0]] = operands[1]
        after = [n + 1] if falls and n + 1 < len(function) else []
        follow.append(after + ([number[target]] if target in number else []))
    return follow


# What is under way: operands of each group of wgmma that has been committed, and of the last, which
# has not.
Groups = Tuple[FrozenSet[int], ...]


def under_way(instruction: Instruction, groups: Groups) -> Groups:
    """After an instruction, of what is before it."""
    name, operands = instruction.name, instruction.operands
    if name.startswith("WARPGROUP.DEPBAR"):
        return groups[-1 - int(operands[1], 16):]
    if not name.startswith(("HGMMA", "QGMMA")):
        return groups
    groups = (*groups[:-1], groups[-1] | registers(operands[1], 4))
    if "gsb0" in operands:
        groups = (*groups, frozenset())
    # A wait leaves seven at most: those before the last seven end together.
    return groups if len(groups) < 10 else (groups[0] | groups[1], *groups[2:])


def overwritten(sass: str) -> List[str]:
    """Instructions that write a register which a wgmma under way reads, by whatever way they are
    reached. Neither ptxas nor the hardware says so, and the emulator has no registers. (A variable
    that is an operand or comes from memory, by a branch: the compiler loads over the operand.)"""
    found = []
    for function in functions(sass):
        follow = successors(function)
        seen: List[Set[Groups]] = [set() for _ in function]
        for start in range(len(function)):
            # Nothing leads there: the first, and where a branch by a register goes.
            left: List[Tuple[int, Groups]] = [] if seen[start] else [(start, (frozenset(),))]
            while left:
                at, groups = left.pop()
                if groups not in seen[at]:
                    seen[at].add(groups)
                    after = under_way(function[at], groups)
                    left += [(n, after) for n in follow[at]]
        found += [f"{at.address:04x}: {at.name} " + ", ".join(at.operands)
                  for at, ways in zip(function, seen)
                  if any(at.writes() & operands for groups in ways for operands in groups)]
    return found


def disassembled(nvcc: str, output: str) -> str:
    """The SASS of an object, by the cuobjdump of nvcc's folder. OSError if there is none,
    CalledProcessError if it fails."""
    folder = os.path.dirname(os.path.realpath(nvcc))
    tool = os.path.join(folder, "cuobjdump")
    done = subprocess.run([tool, "-sass", output], capture_output=True, text=True,
                          env={**os.environ, "PATH": os.environ["PATH"] + os.pathsep + folder})
    if done.returncode or "Function :" not in done.stdout:
        raise subprocess.CalledProcessError(done.returncode, tool, done.stdout, done.stderr)
    return done.stdout


def commands(command: List[str]) -> Iterator[List[str]]:
    """The command as it is, and with other PTX for GPUs after Hopper."""
    yield command
    later = re.compile(r"(?<=arch=compute_)90(?=,code=sm_(1\d\d)$)")
    for ptx in ("80", r"\1"):
        other = [later.sub(lambda found: found.expand(ptx), word) for word in command]
        if other != command:
            yield other


def faults_of(report: str) -> List[str]:
    """What nvcc's report says that fails the build."""
    kernel, faults = "?", []
    for line in report.split("\n"):
        named = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line)
        if named:
            kernel = f"{named[1]} ({named[2]})"
        faults += [f"{kernel} {what}: {line.strip()}" for pattern, what in FAULTS
                   if pattern.search(line)]
    return faults


def main() -> int:
    faults: List[str] = []
    for command in commands(sys.argv[1:]):
        done = subprocess.run(command, capture_output=True, text=True)
        report = done.stdout + done.stderr
        if done.returncode:
            print(report, file=sys.stderr)
            return done.returncode
        faults = faults_of(report)
        if not faults:
            break
    for line in report.split("\n"):
        if "warning" in line:
            print(line, file=sys.stderr)
    output = sys.argv[sys.argv.index("-o") + 1]
    if any("sm_90a" in argument for argument in sys.argv):
        try:
            faults += [f"{output} writes an operand of a wgmma under way: {instruction}"
                       for instruction in overwritten(disassembled(sys.argv[1], output))]
        except (OSError, subprocess.CalledProcessError) as error:
            faults.append(f"{output} is not checked for operands written too early: {error}; "
                          "install cuobjdump beside nvcc (NVIDIA's package cuda-cuobjdump)")
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    with open(output + ".memory", "w", encoding="ascii") as out:
        out.write(f"{taken:.0f}\n")
    for fault in faults:
        print(f"compile.py: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
