"""Finds and loads libflashattn, once, and checks that it fits the header these files come from.

Tried in this order: the file named by the environment variable FLASHATTN_LIBRARY; the library that
a wheel carries, inside the package or in the folder that meson-python or auditwheel puts beside it;
the system's loader, by SONAME.
"""
from __future__ import annotations

import os
import pathlib
from typing import Any, List

from ._constants import HEADER_VERSION, LAYOUT
from ._native import ffi

SONAME = "libflashattn.so.0"
VARIABLE = "FLASHATTN_LIBRARY"


def _bundled() -> List[str]:
    """Libraries that were installed with this package, the exact SONAME first."""
    package = pathlib.Path(__file__).resolve().parent
    folders = [package, *sorted(package.parent.glob(".*flashattn*.mesonpy.libs")),
               *sorted(package.parent.glob("*flashattn*.libs"))]
    found: List[str] = []
    for folder in folders:
        names = {path.name for path in folder.glob("libflashattn*.so*")}
        found += [str(folder / name) for name in sorted(names, key=lambda n: (n != SONAME, n))]
    return found


def _load() -> "tuple[Any, str]":
    chosen = os.environ.get(VARIABLE)
    candidates = [chosen] if chosen else [*_bundled(), SONAME]
    problems = []
    for candidate in candidates:
        try:
            library = ffi.dlopen(candidate)
            return library, os.path.abspath(candidate) if os.sep in candidate else candidate
        except OSError as error:
            problems.append(str(error))
    remedy = (f"correct or unset {VARIABLE}" if chosen else
              f"install the library, or set {VARIABLE} to the path of {SONAME}")
    raise ImportError(f"libflashattn could not be loaded ({'; '.join(problems)}); {remedy}")


def _spelled(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _check(library: Any, where: str) -> None:
    try:
        version = library.flashattn_version()
    except AttributeError:
        raise ImportError(f"{where} is not libflashattn: it has no flashattn_version") from None
    # Up to version 1 a minor version may change the ABI; structures only grow within one.
    if version // 100 != HEADER_VERSION // 100:
        raise ImportError(f"{where} has version {_spelled(version)}, this package is made for "
                          f"{_spelled(HEADER_VERSION)}; install the two together")
    for name, (size, fields) in LAYOUT.items():
        if ffi.sizeof(name) != size:
            raise ImportError(f"{name} has {ffi.sizeof(name)} bytes on this platform, not {size}")
        for field, offset, _ in fields:
            if ffi.offsetof(name, field) != offset:
                raise ImportError(f"{name}.{field} is not at byte {offset} on this platform")


lib, path = _load()
_check(lib, path)


def text(pointer: Any) -> str:
    """A C string of the library."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")
