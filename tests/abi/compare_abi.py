#!/usr/bin/env python3
"""libabigail's opinion:  compare_abi.py OLD_HEADER NEW_HEADER

Compiles each header into a stub library with debug information, every function empty, and lets
abidiff compare the two: what baseline.py says of functions and structures, by other means.
Enumerators, which functions take as int32_t, it does not see."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ERROR, USAGE, INCOMPATIBLE = 1, 2, 8  # bits of abidiff's exit status
# To abidiff an appended member is a change like any other: the words of those that break.
BREAKS = re.compile(r"offset changed|[1-9]\d* Removed|(removal|deletion)|type of '.*' changed"
                    r"|parameter \d+ of type .* (was|changed)|return type changed|from value")


def skip(sentence):
    print("0 passed, 0 failed, 1 skipped: " + sentence)
    sys.exit(77)


def stub(header):
    """A definition for every declared function."""
    text = header.read_text(encoding="utf-8")
    lines = ['#include "flashattn.h"']
    for found in re.finditer(r"^FLASHATTN_API ([^;]*);", text, re.M):
        body = "{}" if found.group(1).startswith("void ") else "{ return 0; }"
        lines.append("%s %s" % (found.group(1), body))
    return "\n".join(lines) + "\n"


def build(header, folder, name):
    source, library = folder / (name + ".c"), folder / (name + ".so")
    source.write_text(stub(header), encoding="utf-8")
    subprocess.run(["cc", "-g", "-w", "-shared", "-fPIC", "-I", str(header.parent), str(source),
                    "-o", str(library)], check=True)
    return str(library)


def main():
    if not shutil.which("abidiff"):
        skip("abidiff is not installed (Debian, Ubuntu: apt-get install abigail-tools)")
    old, new = map(pathlib.Path, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        result = subprocess.run(["abidiff", build(old, folder, "old"), build(new, folder, "new")],
                                capture_output=True, text=True)
    bad = result.returncode & (ERROR | USAGE | INCOMPATIBLE) or BREAKS.search(result.stdout)
    if bad:
        print(result.stdout + result.stderr)
    print("%d passed, %d failed, 0 skipped" % (not bad, bool(bad)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
