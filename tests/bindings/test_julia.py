"""bindings/julia: its own test-suite, where a Julia is installed or can be had.

tests/julia_setup.sh finds one, or unpacks a private one below build/; without network and without
Julia this is a skip with one sentence.
"""
from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
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


LIBRARY = os.environ.get("FLASHATTN_LIBRARY",
                         str(ROOT / "build" / "release" / "src" / "libflashattn.so"))


def test_package(julia: str) -> None:
    environment = {**os.environ, "FLASHATTN_LIBRARY": LIBRARY, "JULIA_NUM_THREADS": "2",
                   "FLASHATTN_CASES": str(ROOT / "tests" / "data"),
                   # Where Julia's compiler finds the library by its name, too.
                   "LD_LIBRARY_PATH": os.path.dirname(LIBRARY),
                   # What Julia compiles is kept out of the home folder.
                   "JULIA_DEPOT_PATH": str(ROOT / "build" / "julia-depot")}
    # Each program here runs once: with optimisation LLVM takes more than all the rest.
    run = subprocess.run([julia, "-O0", "-g0", f"--project={PACKAGE}",
                          str(PACKAGE / "test" / "runtests.jl")], env=environment,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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


def by_package(julia: str, package: str, program: str, *arguments: str, **more: str) -> None:
    """Runs a program that needs a package of Julia's General registry, where it is installed."""
    asked = subprocess.run([julia, "-e", f'print(VERSION, " ", Base.find_package("{package}"))'],
                           capture_output=True, text=True, check=True)
    version, _, path = asked.stdout.partition(" ")
    if path == "nothing":
        pytest.skip(f"Julia {version} has no {package}: it comes from Julia's General registry by "
                    f"`using Pkg; Pkg.add(\"{package}\")`, for Julia 1.6 or newer")
    run = subprocess.run([julia, program, *arguments], stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         env={**os.environ, "FLASHATTN_LIBRARY": LIBRARY, **more})
    assert run.returncode == 0, run.stdout[-8000:]


def test_manual_by_documenter(julia: str, tmp_path: pathlib.Path) -> None:
    """It fails where a docstring or a reference is missing; what the pages list is tested without
    Documenter, too (test/readme.jl)."""
    shutil.copytree(PACKAGE / "docs", tmp_path / "docs")
    by_package(julia, "Documenter", str(tmp_path / "docs" / "make.jl"),
               JULIA_LOAD_PATH=f"@:@v#.#:@stdlib:{PACKAGE}")
    assert (tmp_path / "docs" / "build" / "packages.html").is_file()


def test_recipe_by_binarybuilder(julia: str, tmp_path: pathlib.Path) -> None:
    """Its own parser reads the recipe; what it asks for is tested without it, too."""
    by_package(julia, "BinaryBuilder", str(PACKAGE / "jll" / "build_tarballs.jl"),
               f"--meta-json={tmp_path / 'recipe.json'}", FLASHATTN_COMMIT="0" * 40)
    recipe = json.loads((tmp_path / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["name"] == "libflashattn" and len(recipe["products"]) == 1
