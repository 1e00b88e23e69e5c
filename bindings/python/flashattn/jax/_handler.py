"""The handlers of handler.c, found or compiled, and registered with XLA.

An installation that saw jaxlib holds them compiled. Else the machine's C compiler makes them at the
first import, once, in the user's cache: jaxlib brings the one header that they need, and that takes
less time than importing JAX.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import re
import shlex
import subprocess
import tempfile
from typing import Any, List, Optional

import jax

from .._library import ffi, lib

TARGET, EMPTY = "flashattn", "flashattn_empty"
_FOLDER = pathlib.Path(__file__).resolve().parent
_SOURCE = _FOLDER / "handler.c"
_FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC")


class _Library(ctypes.Structure):
    """Library of handler.c."""

    _fields_ = [("plan_create", ctypes.c_void_p), ("forward", ctypes.c_void_p),
                ("backward", ctypes.c_void_p), ("last_error", ctypes.c_void_p),
                ("device_index", ctypes.c_int64)]


def _api_version(include: pathlib.Path) -> int:
    """Of jaxlib's header, as flashattn_jax_api_version() says it."""
    text = (include / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    major, minor = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)
                    for part in ("MAJOR", "MINOR")]
    if major is None or minor is None:
        raise ImportError(f"jaxlib's header in {include} names no version; install jax 0.6 or "
                          "newer")
    return 1000 * int(major[1]) + int(minor[1])


def _installed(version: int) -> Optional[ctypes.CDLL]:
    """Compiled at installation, for the version of this jaxlib."""
    for path in sorted(_FOLDER.glob("handler*.so")):
        found = ctypes.CDLL(str(path))
        if found.flashattn_jax_api_version() == version:
            return found
    return None


def _cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(base) / "flashattn"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _compiled(include: pathlib.Path) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    header = include / "xla" / "ffi" / "api" / "c_api.h"
    key = hashlib.sha256("\0".join([*compiler, *_FLAGS]).encode() + _SOURCE.read_bytes()
                         + header.read_bytes()).hexdigest()[:32]
    try:
        path = _cache() / f"handler-{key}.so"
    except OSError:  # a home that cannot be written: anew in each process
        path = pathlib.Path(tempfile.mkdtemp(prefix="flashattn-")) / f"handler-{key}.so"
    if not path.exists():
        _compile(compiler, include, path)
    return ctypes.CDLL(str(path))


def _compile(compiler: List[str], include: pathlib.Path, path: pathlib.Path) -> None:
    """Under another name first: processes that start together find the whole file or none."""
    handle, made = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        result = subprocess.run([*compiler, *_FLAGS, f"-I{include}", str(_SOURCE), "-o", made],
                                capture_output=True, text=True, check=False,
                                stdin=subprocess.DEVNULL)
        said = result.stderr.strip()
    except OSError as error:
        said = str(error)
    else:
        if result.returncode == 0:
            os.replace(made, path)
            return
    os.unlink(made)
    raise ImportError(
        "flashattn.jax needs its XLA handlers, which this installation does not hold for this "
        f"jaxlib and the C compiler could not make ({said[-300:]}): install a C compiler (Debian, "
        "Ubuntu: apt-get install gcc) or name one in CC, or install flashattn from source where "
        "jaxlib is installed, without build isolation")


def _register() -> ctypes.CDLL:
    include = pathlib.Path(jax.ffi.include_dir())
    handler = _installed(_api_version(include)) or _compiled(include)
    addresses = [int(ffi.cast("uintptr_t", ffi.addressof(lib, f"flashattn_{name}")))
                 for name in ("plan_create", "forward", "backward", "last_error")]
    handler.flashattn_jax_bind(ctypes.byref(_Library(
        *addresses, ffi.offsetof("flashattn_desc", "device_index"))))

    def stages(function: Any, *names: str) -> Any:
        return {name: jax.ffi.pycapsule(function) for name in names}

    # A plan is made when the program is, or, for each GPU, before its first run: none is made
    # while a CUDA graph is captured.
    jax.ffi.register_ffi_target(
        TARGET, stages(handler.flashattn_jax_cpu, "instantiate", "execute"), platform="cpu")
    jax.ffi.register_ffi_target(
        TARGET, stages(handler.flashattn_jax_cuda, "instantiate", "initialize", "execute"),
        platform="CUDA")
    jax.ffi.register_ffi_target(
        EMPTY, jax.ffi.pycapsule(handler.flashattn_jax_empty), platform="cpu")
    return handler


handlers = _register()
