"""python -m flashattn."""
import os
import pathlib
import subprocess
import sys

import pytest

import flashattn
from flashattn import _matrix

PACKAGES = str(pathlib.Path(flashattn.__file__).parents[1])


def run(*arguments):
    path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, "-m", "flashattn", *arguments], text=True, check=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path}).stdout


def test_prints_build_devices_and_matrix():
    shown = run()
    assert flashattn.build_info() in shown
    assert flashattn.devices()[0].name in shown
    assert "bfloat16" in shown and "paged KV" in shown
    assert "block lists" in shown and "lengths of blocks" in shown


def test_markdown_is_a_table():
    lines = run("--markdown").strip().split("\n")
    assert len(lines) == len(_matrix.ROWS) + 2
    assert all(line.startswith("|") and line.count("|") == lines[0].count("|") for line in lines)
    assert "yes" in lines[2]


def test_a_build_without_gpus_says_how_to_get_one_with_them():
    if "without CUDA" in flashattn.build_info():
        assert "./run build --cuda" in run("--device", "cuda")
        with pytest.raises(NotImplementedError, match="^device = FLASHATTN_DEVICE_CUDA, but"
                                                      ".*\\./run build --cuda"):
            flashattn.check(dtype="float32", heads_q=1, dim_qk=8, device="cuda")
    else:
        assert "./run build --cuda" not in run("--device", "cuda")


def test_matrix_says_why_not():
    table = _matrix.matrix("cuda:99")
    reasons = {cell for _, cells in table.rows for cell in cells}
    assert "yes" not in reasons and reasons == set(table.messages)
    assert all(said[0] for said in table.messages.values())
