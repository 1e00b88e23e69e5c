#!/usr/bin/env python3
"""The header as a later version will have it: each structure that may grow has 64 bytes more.

    header.py include/flashattn.h OUTPUT
"""
import pathlib
import re
import sys

MORE = "  /* A later version's. */\n  int64_t later[8];\n"


def grow(text: str) -> str:
    structures = re.findall(r"typedef struct (\w+) \{\n[^}]*uint32_t struct_size;", text)
    assert len(structures) >= 6, structures
    for name in structures:
        text, count = re.subn(r"(?m)^(\} %s;)$" % name, lambda end: MORE + end[1], text)
        assert count == 1, name
    return text


def main() -> None:
    source, output = map(pathlib.Path, sys.argv[1:])
    output.write_text(grow(source.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
