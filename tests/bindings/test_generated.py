"""The generated layer: up to date, and a header that bindings cannot carry is refused."""
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include" / "flashattn.h").read_text(encoding="utf-8")

pytest.importorskip("pycparser")
sys.path.insert(0, str(ROOT / "bindings"))
from generator import model  # noqa: E402


def test_files_are_those_of_the_header():
    done = subprocess.run([sys.executable, str(ROOT / "bindings" / "generate.py"), "--check"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_model_knows_layout_and_docs():
    read = model.read(HEADER)
    desc = next(s for s in read.structs if s.name == "flashattn_desc")
    assert desc.fields[0].name == "struct_size" and desc.size % desc.alignment == 0
    check = next(f for f in read.functions if f.name == "flashattn_check")
    assert check.doc.startswith("Whether flashattn_plan_create would succeed")
    assert check.section == "Plans"
    assert check.parameters[0].type == model.CType("flashattn_desc", (True,))
    mask = next(e for e in read.enums if e.name == "flashattn_mask")
    assert mask.is_flags and mask.members[0].short == "CAUSAL"


@pytest.mark.parametrize("old, new, complaint", [
    ("int32_t dim_v;", "long dim_v;", "long is not for an ABI"),
    ("int32_t dim_v;", "int32_t dim_v:3;", "bit-field"),
    ("int32_t dim_v;", "int32_t in;", "no name in one of the languages"),
    ("int32_t reserved0;\n", "\n", "implicit padding"),
    ("FLASHATTN_OP_BACKWARD = 2", "FLASHATTN_OP_BACKWARD", "plain number"),
    ("FLASHATTN_OP_BACKWARD = 2", "FLASHATTN_OP_BACKWARD = 3", "no single bit"),
    ("flashattn_plan **plan);", "flashattn_plan **plan, ...);", "any number of arguments"),
    ("flashattn_check(const flashattn_desc *desc)", "flashattn_check(flashattn_desc desc)",
     "by value"),
    ("/* Frees a plan", "#if 0\n/* Frees a plan", "preprocessor line"),
    ("  void *data;", "  char data[8];", "by value"),
    ("enum flashattn_device {", "union u { int32_t a; };\nenum flashattn_device {",
     "cannot carry"),
    ("/* Whether flashattn_plan_create would", "\n/* ---- */\n\n/* Whether", None),
])
def test_discipline(old, new, complaint):
    assert old in HEADER
    text = HEADER.replace(old, new, 1)
    if complaint is None:
        model.read(text)
        return
    with pytest.raises(model.HeaderError, match=complaint):
        model.read(text)


def test_a_function_without_words_is_refused():
    start = HEADER.index("/* Frees a plan")
    end = HEADER.index("*/", start) + 2
    with pytest.raises(model.HeaderError, match="no comment directly above"):
        model.read(HEADER[:start] + HEADER[end:])


def test_layout_is_that_of_this_platform():
    from flashattn._constants import LAYOUT
    from flashattn._native import ffi
    assert set(LAYOUT) == {s.name for s in model.read(HEADER).structs}
    for name, (size, fields) in LAYOUT.items():
        assert ffi.sizeof(name) == size
        assert [f for f, _, _ in fields] == [f for f, _ in ffi.typeof(name).fields]
        for field, offset, _ in fields:
            assert ffi.offsetof(name, field) == offset


def test_library_of_another_version_is_refused():
    from flashattn import _library

    class Newer:
        @staticmethod
        def flashattn_version():
            return _library.HEADER_VERSION + 100

    with pytest.raises(ImportError, match="install the two together"):
        _library._check(Newer, "libflashattn.so.0")


@pytest.mark.parametrize("folder", ["flashattn", ".flashattn.mesonpy.libs", "flashattn.libs"])
def test_library_of_a_wheel_is_found(tmp_path, folder):
    from flashattn import _library
    if not os.path.isfile(_library.path):
        pytest.skip("the library under test was found by the loader")
    shutil.copytree(pathlib.Path(_library.__file__).parent, tmp_path / "flashattn")
    (tmp_path / folder).mkdir(exist_ok=True)
    name = "libflashattn-1a2b3c.so.0" if folder == "flashattn.libs" else _library.SONAME
    shutil.copy(_library.path, tmp_path / folder / name)
    shown = subprocess.run(
        [sys.executable, "-c", "import flashattn._library as l; print(l.path)"], text=True,
        capture_output=True, check=True, env={"PYTHONPATH": str(tmp_path)}).stdout
    assert shown.strip() == str(tmp_path / folder / name)


def test_missing_library_names_the_remedy():
    done = subprocess.run([sys.executable, "-c", "import flashattn"], capture_output=True,
                          text=True, env={"FLASHATTN_LIBRARY": "/nowhere/libflashattn.so.0",
                                          "PYTHONPATH": str(ROOT / "bindings" / "python")})
    assert done.returncode != 0
    assert "ImportError: libflashattn could not be loaded" in done.stderr
    assert "correct or unset FLASHATTN_LIBRARY" in done.stderr
