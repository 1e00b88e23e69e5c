#!/usr/bin/env python3
"""Writes a C file whose functions carry every name that a library has of its own, C++ names
included, and abort:  impostor.py LIBRARY OUTPUT"""
import pathlib
import re
import subprocess
import sys

names = subprocess.run(["nm", sys.argv[1]], check=True, capture_output=True, text=True).stdout
# A dot marks a clone that the compiler named.
own = sorted(set(re.findall(r" [TtWu] (\w*flashattn\w*)$", names, re.M)))
assert any(name.startswith("_ZN9flashattn") for name in own), "the library was stripped"
lines = ["#include <stdlib.h>"]
for number, name in enumerate(own):
    lines += ['void impostor_%d(void) __asm__("%s");' % (number, name),
              "void impostor_%d(void) { abort(); }" % number]
pathlib.Path(sys.argv[2]).write_text("\n".join(lines) + "\n", encoding="ascii")
