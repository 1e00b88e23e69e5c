#!/usr/bin/env python3
"""Writes the raw layer of every binding from include/flashattn.h.

    generate.py            writes the files
    generate.py --check    compares them, and names those that differ

The files are committed, so that building or installing needs neither pycparser nor this script. To
add a language: write an emitter (Model -> text) in generator/, and list its files in main.
"""
from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Callable, Dict

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = "include/flashattn.h"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    # Needs pycparser, which --help does not.
    from generator import emit_c, emit_julia, emit_python, emit_rust
    from generator.model import HeaderError, Model, read

    files: Dict[str, Callable[[Model], str]] = {
        "bindings/python/flashattn/_native.py": emit_python.emit_native,
        "bindings/python/flashattn/_constants.py": emit_python.emit_constants,
        "bindings/rust/flashattn-sys/src/lib.rs": emit_rust.emit,
        "bindings/julia/src/LibFlashAttn.jl": emit_julia.emit,
        "tests/abi/layout.c": emit_c.emit_layout,
        "tests/abi/reasons.h": emit_c.emit_reasons,
    }
    try:
        model = read((ROOT / HEADER).read_text(encoding="utf-8"))
    except HeaderError as error:
        print(f"{HEADER}: {error}", file=sys.stderr)
        return 1
    stale = []
    for name, emit in files.items():
        path, data = ROOT / name, emit(model).encode("utf-8")
        if check:
            if not path.is_file() or path.read_bytes() != data:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for name in stale:
        print(f"{name} differs from {HEADER}: run bindings/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
