"""The programs of a page: its fenced blocks of Python run when the site is built, in their order
and in one process, so that a later block has the names of an earlier one.

    <!-- not run: why -->    above a block: it is shown, and does not run
    <!-- output -->          below a block: what it prints is shown there

A page whose programs import a package that is no part of the build runs with the Python that has
it, or not at all, for a reason that is reported.
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import traceback
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV_TORCH = ROOT / "build" / "venv-torch"  # of tests/torch_setup.py
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^\n]*) -->\n)?```(?P<language>\w+)\n"
                   r"(?P<code>.*?)```\n(?P<output>\n?<!-- output -->\n)?", re.S)
SECONDS = 1200  # for a page, where many other programs run; alone none takes 15
PACKAGES = ("torch", "transformers", "jax")  # that a page may import


class Result(NamedTuple):
    outputs: List[Optional[str]]  # of each block of Python; None: it did not run
    not_run: List[str]  # why
    error: str  # of the block that failed


def blocks(text: str, language: str = "python") -> List["re.Match[str]"]:
    return [block for block in BLOCK.finditer(text) if block["language"] == language]


def interpreter(text: str) -> Tuple[str, Dict[str, str], str]:
    """A Python for the programs of a page, its environment, and why there is none."""
    needed = [name for name in PACKAGES
              if any(re.search(rf"\b(import|from)\b.*\b{name}\b", block["code"])
                     for block in blocks(text))]
    python, path = sys.executable, [str(ROOT / "bindings" / "python")]
    if {"torch", "transformers"} & set(needed):
        python = str(VENV_TORCH / "bin" / "python")
        path.append(str(VENV_TORCH / "transformers5"))
        if not (VENV_TORCH / ".installed").exists():
            return python, {}, "no PyTorch in build/venv-torch: ./run test torch makes it"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "2"}
    for name in needed:
        found = subprocess.run([python, "-c", f"import importlib.util as u, sys; "
                                f"sys.exit(u.find_spec({name!r}) is None)"], env=env, check=False)
        if found.returncode:
            return python, env, f"no {name} is installed for this Python"
    return python, env, ""


def run(page: pathlib.Path) -> Result:
    """Runs the programs of a page, by a Python of their own."""
    text = page.read_text(encoding="utf-8")
    all_of_them = blocks(text)
    not_run = [block["why"] for block in all_of_them if block["why"]]
    if len(not_run) == len(all_of_them):
        return Result([None] * len(all_of_them), not_run, "")
    python, env, why = interpreter(text)
    if why:
        return Result([None] * len(all_of_them), [*not_run, why], "")
    try:
        done = subprocess.run([python, str(pathlib.Path(__file__).resolve()), str(page)], cwd=ROOT,
                              env=env, capture_output=True, text=True, check=False,
                              timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Result([], not_run, f"its programs took more than {SECONDS} s")
    if done.returncode:
        return Result([], not_run, (done.stderr or done.stdout)[-4000:])
    return Result(json.loads(done.stdout.splitlines()[-1]), not_run, "")


def _main(page: pathlib.Path) -> None:
    """In the process of the programs."""
    text = page.read_text(encoding="utf-8")
    names: Dict[str, Any] = {"__name__": "__main__"}
    outputs: List[Optional[str]] = []
    for block in blocks(text):
        printed = io.StringIO()
        line = text.count("\n", 0, block.start("code"))
        if not block["why"]:
            # As many empty lines as stand before it: a traceback names the page's lines.
            code = compile("\n" * line + block["code"], str(page), "exec")
            try:
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
            except BaseException:
                sys.exit(printed.getvalue() + traceback.format_exc())
        outputs.append(None if block["why"] else printed.getvalue())
    print(json.dumps(outputs))


if __name__ == "__main__":
    _main(pathlib.Path(sys.argv[1]))
