"""cargo, as the tests of the Rust crates call it."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUST = ROOT / "bindings" / "rust"
TARGET = ROOT / "build" / "rust"
BRIDGES = ROOT / "build" / "rust-bridges"  # of the crates outside the workspace
LIBRARY = pathlib.Path(os.environ.get("FLASHATTN_LIBRARY",
                                      ROOT / "build" / "release" / "src" / "libflashattn.so"))
# These variables decide where build.rs looks.
LOOKUP = ("DOCS_RS", "FLASHATTN_LIB_DIR", "FLASHATTN_BUILD_FROM", "PKG_CONFIG", "PKG_CONFIG_PATH",
          "PKG_CONFIG_LIBDIR")

if not shutil.which("cargo"):
    pytest.skip("no cargo: the Rust crates are not tested (https://rustup.rs)",
                allow_module_level=True)
if not LIBRARY.is_file():
    pytest.skip("no libflashattn.so: ./run build makes it", allow_module_level=True)
LINKED = {"FLASHATTN_LIB_DIR": str(LIBRARY.resolve().parent)}


def cargo(*arguments, lookup=LINKED, folder=RUST, target=TARGET, **more):
    """Runs cargo; returns its exit code and all it said."""
    environment = {k: v for k, v in os.environ.items() if k not in LOOKUP}
    environment.update(lookup, CARGO_TARGET_DIR=str(target), CARGO_TERM_COLOR="never",
                       CARGO_PROFILE_DEV_DEBUG="line-tables-only", **more)
    done = subprocess.run(["cargo", *arguments], cwd=folder, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def succeed(*arguments, **more):
    code, said = cargo(*arguments, **more)
    assert code == 0, said[-8000:]
    return said


def passed(said):
    """How many tests cargo ran."""
    return sum(int(n) for n in re.findall(r"test result: ok\. (\d+) passed", said))


def fetched(folder, *features):
    """Why a crate's dependencies cannot be had; nothing where they are there. Only those that this
    machine compiles are fetched."""
    code, said = cargo("tree", "--locked", "--quiet", *features, folder=folder)
    if code and not re.search(r"lock file .* needs to be updated", said):
        return said.strip().splitlines()[-1]
    assert code == 0, said
    return ""


def has(component):
    return cargo(component, "--version")[0] == 0
