"""Compiles one .cu file, and fails where the assembler had to make do: a spill, a stack frame, a
serialised wgmma pipeline (ptxas C75xx). Beside OUTPUT it leaves OUTPUT.memory: how many MB the
largest of its processes took. compile.py NVCC ARGUMENT... -o OUTPUT ..."""
import re
import resource
import subprocess
import sys

FAULTS = (
    (re.compile(r"(?<!\d)[1-9]\d* bytes stack frame"), "uses a stack frame"),
    (re.compile(r"(?<!\d)[1-9]\d* bytes spill"), "spills registers"),
    (re.compile(r"\bC75\d\d\b"), "loses its pipeline"),
)


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
    taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    with open(sys.argv[sys.argv.index("-o") + 1] + ".memory", "w", encoding="ascii") as out:
        out.write(f"{taken:.0f}\n")
    for fault in faults:
        print(f"compile.py: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
