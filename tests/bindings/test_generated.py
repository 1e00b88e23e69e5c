"""The generated layer: up to date, and a header that bindings cannot carry is refused."""
import inspect
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
from generator import arrays, model  # noqa: E402


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
    ("int32_t dtype_part;\n  int32_t reserved;\n", "int32_t dtype_part;\n", "implicit padding"),
    ("FLASHATTN_OP_BACKWARD = 2", "FLASHATTN_OP_BACKWARD", "plain number"),
    ("FLASHATTN_OP_BACKWARD = 2", "FLASHATTN_OP_BACKWARD = 3", "no single bit"),
    ("flashattn_error *error);", "flashattn_error *error, ...);", "any number of arguments"),
    ("flashattn_check(const flashattn_desc *desc,", "flashattn_check(flashattn_desc desc,",
     "by value"),
    ("/* Frees a plan", "#if 0\n/* Frees a plan", "preprocessor line"),
    ("  void *data;", "  char data;", "by value"),
    ("  flashattn_error *error;", "  flashattn_error error;", "flashattn_error by value, which"),
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


def test_describe_covers_the_descriptor():
    """A field or a bit of flashattn_desc without a keyword could not be set from Python."""
    from flashattn._constants import Descriptor
    from flashattn._describe import _BITS, describe
    from flashattn._options import OPTIONS
    keywords = set(inspect.signature(describe).parameters)
    assert keywords == set(OPTIONS) and {keyword for keyword, _, _ in _BITS} <= keywords
    several = {"device": ["device_index"], "window": ["window_left", "window_right"]}
    covered = keywords.union({member for _, member, _ in _BITS}, *several.values())
    desc = next(s for s in model.read(HEADER).structs if s.name == "flashattn_desc")
    names = [field.name for field in desc.fields[1:]]
    assert list(Descriptor._fields) == names and set(names) <= covered


def test_the_table_of_arrays_is_that_of_the_header():
    from flashattn._constants import ARRAYS, ArrayOptions, OutputOptions
    from flashattn._native import ffi

    def arrays_of(field):
        """Whether a member is an array of tensors or numbers; whether they have strides."""
        kind = field.type.item if field.type.kind == "pointer" else field.type
        kind = kind.item if kind.kind == "pointer" else kind
        return (kind.kind in ("primitive", "struct") and field.type.kind != "primitive"
                and kind.cname != "struct flashattn_error", kind.cname == "struct flashattn_tensor")

    assert len(ARRAYS) == 4
    for struct, table in ARRAYS.items():
        members = {name: arrays_of(field) for name, field in ffi.typeof(struct).fields}
        assert {name: array.tensor for name, array in table.items()} == {
            name: strided for name, (is_array, strided) in members.items() if is_array}
    assert {"bias", "starts_kv", "rng_device", "descale_latent"} <= set(
        ArrayOptions.__annotations__)
    assert not {"q", "page_table", "dout", "amax_o"} & set(ArrayOptions.__annotations__)
    assert set(OutputOptions.__annotations__) == {"amax_o"}
    table = ARRAYS["flashattn_args"]
    mask = table["block_mask"]
    assert [(d.size, d.by, d.stride) for d in mask.dims[1:]] == [
        ("heads_q", "", "stride_head"), ("seqlen_q", "block_q", "stride_seq"),
        ("seqlen_kv", "block_kv", "")]
    assert mask.condition == "required with BLOCKS" and mask.type == "u8"
    assert table["cu_seqlens_q"].dims[0].more == 1
    assert [table[name].role for name in ("o", "dlse", "dbias")] == ["output", "upstream",
                                                                     "gradient"]


def test_arrays_of_other_structures():
    """What has no comment of its own is as in flashattn_args; what has the shape of another array
    is laid out like it."""
    from flashattn._constants import ARRAYS
    first, merge, quantize, append = (ARRAYS[f"flashattn_{name}args"] for name in (
        "", "merge_", "quantize_", "append_kv_"))
    for table in (quantize, append):
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "lens_q", "starts_kv"):
            assert table[name] == first[name]
    assert append["lens_kv"].condition == "required" != first["lens_kv"].condition
    assert append["lens_out"].role == quantize["k_mean"].role == merge["lse"].role == "output"
    assert quantize["lse_shift"].layouts == first["lse"].layouts != {}
    assert append["v_cache"].layouts == first["v"].layouts and len(first["v"].layouts) == 2
    assert [(d.size, d.by, d.stride) for d in append["rotary_cos"].dims] == [
        ("rotary_positions", "", "stride_seq"), ("rotary_dim", "2", "")]
    assert [name for name, array in merge.items() if array.parts] == ["part_o", "part_lse"]


def test_a_new_array_is_a_line_of_the_header():
    new = "  /* (batch, heads_kv); f32; optional. A factor of k's heads. */\n" \
          "  flashattn_tensor gains;\n"
    at = HEADER.index("  /* Random numbers of the dropout: see")
    table = arrays.arguments(model.read(HEADER[:at] + new + HEADER[at:]))[0].arrays
    found = next(array for array in table if array.name == "gains")
    assert (found.type, found.tensor, found.role, found.condition) == ("f32", True, "input",
                                                                       "optional")
    assert [(d.size, d.stride) for d in found.dims] == [("batch", "batch"), ("heads_kv", "head")]
    for wrong, complaint in (("/* A factor. */", "no .\\(dims\\); type; condition"),
                             ("/* (batch * 2); f32; optional. */", "is no size")):
        text = HEADER[:at] + new.replace(new.strip().split("\n")[0], wrong) + HEADER[at:]
        with pytest.raises(model.HeaderError, match=complaint):
            arrays.arguments(model.read(text))


LATER = """
import numpy as np, flashattn
from flashattn import FlashAttentionError

q, k = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)
def refused(words, function, *arrays, **options):
    try:
        function(*arrays, **options)
    except FlashAttentionError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

# The library is older: it finds arrays that it does not know where it looks for zeros.
for function in (flashattn.attention, flashattn.Plan(
        dtype="float32", heads_q=4, heads_kv=2, dim_qk=8).forward):
    function(q, k, k)
    refused("struct_size", function, q, k, k, most_o=np.zeros((2, 1), np.float32))
    refused("most_o has shape (3,), which does not broadcast to (batch, heads_q) = (2, 4)",
            function, q, k, k, most_o=np.zeros(3, np.float32))
    refused("most_o is read-only", function, q, k, k,
            most_o=np.broadcast_to(np.float32(0), (2, 4)))
flashattn.quantize(q, k, k)
refused("struct_size", flashattn.quantize, q, k, k, skip_q=[1, 0])
cache = np.zeros((2, 9, 2, 8), np.float32)
flashattn.append_kv(cache, cache.copy(), [0, 1], k, k)
for name, shape in (("later_in", (1, 2)), ("later_out", (2, 2))):
    refused("struct_size", flashattn.append_kv, cache, cache.copy(), [0, 1], k, k,
            **{name: np.zeros(shape, np.float32)})
refused("later_out has shape (3,)", flashattn.append_kv, cache, cache.copy(), [0, 1], k, k,
        later_out=np.zeros(3, np.float32))
"""


def test_new_arrays_are_options_of_python(tmp_path):
    """Arrays that a later header adds to each structure are checked, and given to the library."""
    from flashattn import _library
    from generator import emit_python
    header = HEADER
    for struct, name, comment in (
            ("args", "most_o", "(batch, heads_q); f32; optional. Forward writes it"),
            ("quantize_args", "skip_q", "(batch); i32; optional. Sequences to leave out"),
            ("append_kv_args", "later_in", "(batch, heads_kv); f32; optional. A factor"),
            ("append_kv_args", "later_out", "(batch, heads_kv); f32; optional. Written")):
        end = f"}} flashattn_{struct};"
        kind = "const int32_t *" if "i32" in comment else "flashattn_tensor "
        header = header.replace(end, f"  /* {comment}. */\n  {kind}{name};\n{end}")
    read = model.read(header)
    shutil.copytree(pathlib.Path(_library.__file__).parent, tmp_path / "flashattn",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for name, emit in (("_native", emit_python.emit_native),
                       ("_constants", emit_python.emit_constants)):
        (tmp_path / "flashattn" / f"{name}.py").write_text(emit(read), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", LATER], text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path),
                               "FLASHATTN_LIBRARY": _library.path})
    assert done.returncode == 0, done.stderr


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

    with pytest.raises(ImportError, match="has version 0.3.0, this package is made for 0.2.0"):
        _library._check(Newer, "libflashattn.so.0")
    Newer.flashattn_version = staticmethod(lambda: 100)
    with pytest.raises(ImportError, match="has version 0.1.0, .* install the two together"):
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
