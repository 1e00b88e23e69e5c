"""bindings/julia: its own test-suite, where a Julia is installed or can be had.

tests/julia_setup.sh finds one, or unpacks a private one below build/; without network and without
Julia this is a skip with one sentence.
"""
from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bindings" / "julia"
NO_JULIA = 77  # the exit status of a test that cannot run here


@pytest.fixture(scope="session")
def julia() -> str:
    found = subprocess.run([str(ROOT / "tests" / "julia_setup.sh")], stdin=subprocess.DEVNULL,
                           capture_output=True, text=True)
    if found.returncode == NO_JULIA:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_package(julia: str) -> None:
    library = os.environ.get("FLASHATTN_LIBRARY",
                             str(ROOT / "build" / "release" / "src" / "libflashattn.so"))
    environment = {**os.environ, "FLASHATTN_LIBRARY": library, "JULIA_NUM_THREADS": "2",
                   "FLASHATTN_CASES": str(ROOT / "tests" / "data"),
                   # What Julia compiles is kept out of the home folder.
                   "JULIA_DEPOT_PATH": str(ROOT / "build" / "julia-depot")}
    run = subprocess.run([julia, f"--project={PACKAGE}", str(PACKAGE / "test" / "runtests.jl")],
                         env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout[-8000:]
    summary = re.search(r"^FlashAttention +\|.*$", run.stdout, re.M)
    cases = re.search(r"^shared cases: \d+ forward, \d+ backward$", run.stdout, re.M)
    assert summary and cases, run.stdout[-8000:]
    refusals = re.search(r"^shared refusals: (\d+)$", run.stdout, re.M)
    listed = (ROOT / "tests" / "data" / "refusals.txt").read_text().strip().split("\n\n")
    assert refusals and int(refusals.group(1)) == len(listed), run.stdout[-8000:]
    assert "the collector: skipped" not in run.stdout
    print(f"{julia}: {summary.group(0)}\n{cases.group(0)}")
