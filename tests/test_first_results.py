"""A stranger's first result: the commands that the manual's page of each language names under that
heading, two at most, as they stand there, in the root of a tree.

What a package manager would fetch is there: the dependencies that other suites have, and the
library's objects of tests/test_wheel.py, which pip links.
"""
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "bindings" / "docs"
BUILD = ROOT / "build"
sys.path.append(str(DOCS))
from programs import VENV_TORCH  # noqa: E402

# The text that each page's program prints.
RESULTS = {"c": "tokens are those of the float64 reference", "python": "38.0",
           "pytorch": "tensor(38.)", "jax": "38.0", "rust": "o[0, 0, 0, ..4] = [", "julia": "38.0"}


def commands(page):
    """The lines of the page's block, without the shell's ways to put several into one."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^## First result\n(?:(?!^#).)*?^```sh\n(.*?)^```$", text, re.M | re.S)
    lines = block.splitlines()
    for line in lines:
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
        assert not re.search(r"&|\||;|\\$", words), f"{page}: more than one command: {line}"
    return lines


def python_environment(folder, packages):
    """A new virtual environment, to which the packages in other folders are installed, too."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(map(str, packages)) + "\n", encoding="utf-8")
    options = f"build-dir={BUILD / 'wheel' / 'objects'} setup-args=-Dcuda=disabled " \
              "setup-args=-Dwheel_link_args=[]"
    return {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONFIG_SETTINGS": options, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1"}


def environment(page, folder):
    """Variables by which the page's commands find their programs; a skip where there is none."""
    own = sysconfig.get_path("purelib")
    if page in ("python", "jax"):
        if page == "jax" and not importlib.util.find_spec("jax"):
            pytest.skip("no JAX could be installed for this Python")
        return python_environment(folder, [own])
    if page == "pytorch":
        if not (VENV_TORCH / ".installed").exists():
            pytest.skip("no PyTorch in build/venv-torch: ./run test torch makes it")
        (theirs,) = VENV_TORCH.glob("lib/python*/site-packages")
        return python_environment(folder, [theirs, own])
    if page == "rust":
        if not shutil.which("cargo"):
            pytest.skip("no cargo (https://rustup.rs)")
        return {"CARGO_TARGET_DIR": str(BUILD / "rust")}
    if page == "julia":
        found = subprocess.run([ROOT / "tests" / "julia_setup.sh"], stdin=subprocess.DEVNULL,
                               capture_output=True, text=True, check=False)
        if found.returncode:
            pytest.skip(found.stderr.strip())
        program = folder / "julia"
        program.write_text(f"#!/bin/sh\nexec '{found.stdout.strip()}' \"$@\"\n", encoding="utf-8")
        program.chmod(0o755)
        return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                "JULIA_DEPOT_PATH": str(BUILD / "julia-depot")}
    return {}


def test_every_language_has_its_commands():
    for page in RESULTS:
        assert 1 <= len(commands(page)) <= 2, page
    (listed,) = re.findall(r"^:caption: By language and framework\n.*?\n\n(.*?)^```",
                           (DOCS / "index.md").read_text(encoding="utf-8"), re.M | re.S)
    assert set(listed.split()) - {"transformers"} == set(RESULTS)


@pytest.mark.parametrize("page", RESULTS)
def test_first_result(page, tmp_path):
    # A clean start: neither this tree's Python package nor a library that somebody has named.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("FLASHATTN_") and name != "PYTHONPATH"}
    env.update(environment(page, tmp_path))
    said = ""
    for command in commands(page):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, check=False)
        said = done.stdout
        assert done.returncode == 0, f"$ {command}\n{said}{done.stderr}"
    assert RESULTS[page] in said, said
