"""pip's way: a wheel built from the root, installed into a clean virtual environment."""
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from numerics import arrays

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
PINS = ROOT / "tests" / "requirements-base.txt"

PROGRAM = """
import flashattn, numpy as np
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 77, 8, 64), np.float32)
out = flashattn.attention(q, k, v, causal=True)
np.save("o.npy", out)
print(flashattn.__file__)
"""


def run(*command, **more):
    # A clean start: neither this tree's package nor its library.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith("FLASHATTN_") and name != "PYTHONPATH"}
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            env=env, check=False, **more)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments, python=sys.executable):
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel():
    out = WORK / "out"
    shutil.rmtree(out, ignore_errors=True)
    # The build folder is kept, so that the next run compiles only what changed.
    pip("wheel", "--no-build-isolation", "--no-deps", "-w", out,
        f"--config-settings=build-dir={WORK / 'objects'}", ".")
    (path,) = out.glob("flashattn-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel):
    house = WORK / "house"
    if not list(house.glob("cffi-*")) or not list(house.glob("numpy-*")):
        try:
            pip("download", "-q", "-d", house, "-c", PINS, "cffi", "numpy")
        except AssertionError:
            pytest.skip("cffi and numpy could not be fetched: this test needs a network once")
    venv = WORK / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    run(sys.executable, "-m", "venv", venv)
    pip("install", "-q", "--no-index", "--find-links", house, wheel, python=venv / "bin" / "python")
    return venv / "bin" / "python"


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"flashattn/__init__.py", "flashattn/py.typed", "flashattn/libflashattn.so.0"} <= names
    # The XLA handlers are compiled where jaxlib brings their header.
    has_jaxlib = importlib.util.find_spec("jaxlib") is not None
    assert ("flashattn/jax/handler.so" in names) == has_jaxlib and "flashattn/jax/nn.py" in names
    folders = {name.split("/")[0] for name in names}
    assert all(f == "flashattn" or f.endswith(".dist-info") for f in folders), folders
    assert wheel.name.startswith("flashattn-0.") and "-linux_" in wheel.name


def test_attention(python, tmp_path):
    place = run(python, "-c", PROGRAM, cwd=tmp_path)
    assert str(WORK / "venv") in place
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 77, 8, 64), np.float32)
    arrays.close(np.load(tmp_path / "o.npy"), arrays.attention(q, k, v, causal=True)[0], 1e-5)


def test_command(python, tmp_path):
    assert "libflashattn" in run(python, "-m", "flashattn", cwd=tmp_path)
