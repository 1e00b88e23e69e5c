"""The same in all languages: what Python, Rust and Julia have of each function, array, field and
bit of the header. The sources are read, so that no toolchain is needed."""
import operator
import pathlib
import re
import sys

import pytest

import flashattn
from flashattn._constants import ARRAYS

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytest.importorskip("pycparser")
sys.path.insert(0, str(ROOT / "bindings"))
from generator import model  # noqa: E402
from generator.emit_rust_tables import COMPOSED  # noqa: E402

MODEL = model.read((ROOT / "include" / "flashattn.h").read_text(encoding="utf-8"))
GENERATED = ("LibFlashAttn.jl", "_native.py", "_constants.py")


def source(folder, pattern):
    return "\n".join(path.read_text(encoding="utf-8")
                     for path in sorted((ROOT / "bindings" / folder).glob(pattern))
                     if path.name not in GENERATED)


PYTHON = source("python/flashattn", "_*.py")
RUST = source("rust/flashattn/src", "*.rs")
JULIA = source("julia/src", "*.jl")

# The functions of Python, Rust and Julia that call one of the header's. Those that lack one have
# what does the same: structures come zeroed, and statuses have names. Julia has no log, whose lines
# come from threads that Julia does not know.
NONE = ("", "", "")
FUNCTIONS = {
    "flashattn_version": ("__version__", "version", "__init__"),
    "flashattn_version_string": ("__version__", "version", ""),
    "flashattn_build_info": ("build_info", "build_info", "build_info"),
    "flashattn_status_name": ("Status", "", ""),
    "flashattn_last_error": ("FlashAttentionError", "check", "fail"),
    "flashattn_set_log": ("set_log", "set_log", ""),
    "flashattn_device_count": ("devices", "device_count", "devices"),
    "flashattn_device_info": ("devices", "device_info", "devices"),
    "flashattn_desc_init": NONE,
    "flashattn_check": ("check", "check", "check_supported"),
    "flashattn_plan_create": ("Plan", "build", "Plan"),
    "flashattn_plan_destroy": ("Plan", "drop", "Plan"),
    "flashattn_plan_desc": ("Plan.descriptor", "desc", "Plan"),
    "flashattn_plan_info": ("Plan.info", "info", "info"),
    "flashattn_workspace_size": ("Plan.workspace_size", "workspace_size", "workspace_size"),
    "flashattn_args_init": NONE,
    "flashattn_merge_args_init": NONE,
    "flashattn_quantize_args_init": NONE,
    "flashattn_append_kv_args_init": NONE,
    "flashattn_forward": ("attention", "forward", "attention"),
    "flashattn_backward": ("attention_backward", "backward", "attention_backward"),
    "flashattn_merge": ("merge", "merge", "merge"),
    "flashattn_quantize": ("quantize", "quantize", "quantize"),
    "flashattn_append_kv": ("append_kv", "append_kv", "append_kv!"),
    "flashattn_dropout_mask": ("dropout_mask", "dropout_mask", "dropout_mask"),
}


def test_functions():
    assert [function.name for function in MODEL.functions] == list(FUNCTIONS)
    for name, (python, rust, julia) in FUNCTIONS.items():
        if python:
            operator.attrgetter(python)(flashattn)
        assert bool(python) == bool(re.search(rf"\.{name}\b", PYTHON)), name
        assert bool(rust) == bool(re.search(rf"\bsys::{name}\b", RUST)), name
        assert not rust or re.search(rf"\bfn {rust}\b", RUST), name
        assert bool(julia) == bool(re.search(rf"\bC\.{name}\b", JULIA)), name
        form = rf"^(@noinline )?(function |mutable struct )?{re.escape(julia)}(\(|$)"
        assert not julia or re.search(form, JULIA, re.M), name


@pytest.mark.parametrize("struct", ARRAYS)
def test_arrays(struct):
    """Each friendly layer loops over the table of each structure, and over each role in it."""
    assert re.search(rf'"{struct}"', PYTHON) and f"C.ARRAYS.{struct}" in JULIA
    roles = {array.role for array in ARRAYS[struct].values()}
    looped = set(re.findall(rf"sys::arrays!\({struct}, (\w+) =>", RUST))
    if struct == "flashattn_merge_args":  # what it writes is an Output, as of forward
        assert 'arrays.of("merge")' in RUST
        looped |= roles
    assert looped == roles


def test_fields():
    """Python: test_generated.py. Julia's MEMBERS are the structure's."""
    assert "fieldnames(C.flashattn_desc)" in JULIA and "sys::desc_fields!" in RUST
    desc = next(struct for struct in MODEL.structs if struct.name == "flashattn_desc")
    for field in desc.fields:
        assert field.name not in COMPOSED or re.search(
            rf"\b{field.name}\b", source("rust/flashattn/src", "desc.rs")), field.name


def test_bits():
    """Python and Julia loop over the bits of the descriptor."""
    for enum in MODEL.enums:
        if not enum.is_flags:
            continue
        prefix = enum.name[len("flashattn_"):]
        for bit in enum.members:
            rust = "Op" if prefix == "op" else enum.name
            builder = source("rust/flashattn/src", "desc.rs") if prefix != "transform" else RUST
            assert re.search(rf"\b{rust}::{bit.short}\b", builder), bit.name
            if prefix == "transform":
                assert f"Transform.{bit.short}" in PYTHON and f"C.{bit.name}" in JULIA
            else:
                assert prefix.capitalize() in PYTHON and f"C.{enum.name}" in JULIA
