"""The cases and refusals that all languages share (tests/data), through the functions that programs
call: results within the tolerances, and the same status, reason and field, whichever layer
refuses."""
import pathlib

import ml_dtypes
import numpy as np
import pytest

import flashattn
from flashattn import Feature, Layout, Mask, Reason, Status

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
BLOB = (DATA / "cases.bin").read_bytes()
TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "u8": np.bool_,
         "i32": np.int32, "f64": np.float64}
BY_CODE = {1: np.float32, 2: np.float16, 3: ml_dtypes.bfloat16}
# Members of flashattn_desc that an option of the same name says.
SAME = ("chunk", "block_q", "block_kv", "scale", "softcap", "dropout", "splits", "determinism",
        "threads")


def paragraphs(name):
    for paragraph in (DATA / name).read_text(encoding="ascii").strip().split("\n\n"):
        yield [line.split() for line in paragraph.split("\n")]


def number(text):
    return float(text) if set(text) & set(".e") else int(text)


def numbers(words):
    return {name: number(value) for name, value in (word.split("=") for word in words)}


def array(dtype, dims, offset):
    shape = tuple(map(int, dims.split(",")))
    count = int(np.prod(shape))
    return np.frombuffer(BLOB, TYPES[dtype], count, int(offset) if count else 0).reshape(shape)


def read(lines):
    case = dict(name=lines[0][1], arrays={}, expect={})
    for kind, *words in lines[1:]:
        if kind == "array":
            case["arrays"][words[0]] = array(*words[1:])
        elif kind == "expect":
            case["expect"][words[0]] = array(*words[1:4]), float(words[4])
        else:
            case[kind] = numbers(words)
    return case


CASES = {case["name"]: case for case in map(read, paragraphs("cases.txt"))}


def options(case):
    """The keywords that say what the members of the descriptor and of the arguments do."""
    desc, args, arrays = case["desc"], case["args"], case["arrays"]
    mask, layout = desc.get("mask", 0), desc.get("layout", 0)
    given = {name: desc[name] for name in SAME if name in desc}
    given.update({name: x for name, x in arrays.items()
                  if name not in ("q", "k", "v", "dout", "dlse")})
    given.update({name: args[name] for name in ("rng_seed", "rng_offset") if name in args})
    given["causal"], given["top_left"] = bool(mask & Mask.CAUSAL), bool(mask & Mask.TOP_LEFT)
    if mask & Mask.WINDOW:
        given["window"] = desc.get("window_left", 0), desc.get("window_right", 0)
    for side, bit in (("q", Layout.VARLEN_Q), ("kv", Layout.VARLEN_KV | Layout.PAGED_KV)):
        if layout & bit:
            given["max_seqlen_" + side] = args.get("seqlen_" + side, 0)
    return given


def forward(case, given, **more):
    q, k, v = (case["arrays"][name] for name in "qkv")
    if "page_table" in given:
        given = dict(given, lens_kv=given.get("lens_kv"))
        return flashattn.attention_paged(q, k, v, **given, **more)
    return flashattn.attention_varlen(q, k, v, **given, **more)


def judge(name, got, expected, tolerance, may_be_zero):
    """Where NaN is expected nothing is written; arrays that are made here hold zeros there."""
    got, expected = np.asarray(got, np.float64).ravel(), expected.ravel()
    unwritten = np.isnan(expected)
    with np.errstate(invalid="ignore"):
        right = np.where(unwritten, np.isnan(got) | (may_be_zero & (got == 0)),
                         (got == expected) | (np.abs(got - expected) <= tolerance))
    assert right.all(), f"{name}: {(~right).sum()} wrong, the first at {np.argmin(right)}"


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    desc, arrays, expect = (case[part] for part in ("desc", "arrays", "expect"))
    given = options(case)
    made = {x: np.full(expect[x][0].shape, np.nan, BY_CODE[
        desc.get("dtype_o", desc["dtype"]) if x == "o" else desc["dtype"]])
        for x in ("o", "dq", "dk", "dv") if x in expect}
    features = desc.get("features", 0)
    found = forward(case, given, o=made.pop("o"), return_lse=bool(features & Feature.LSE))
    results = dict(zip(("o", "lse"), found if type(found) is tuple else (found,)))
    if desc["ops"] & flashattn.Op.BACKWARD:
        wanted = [x for x in ("dbias", "dsink") if x in expect]
        if "dbias" in expect and expect["dbias"][0].shape != arrays["bias"].shape:
            wanted.remove("dbias")  # here it is summed as the bias is broadcast
        gradients = flashattn.attention_backward(
            arrays["dout"], *[arrays[x] for x in "qkv"], results["o"], results["lse"],
            dlse=arrays.get("dlse"), **{"return_" + x: True for x in wanted}, **made, **given)
        results.update(zip(["dq", "dk", "dv", *wanted], gradients))
    for key, got in results.items():
        judge(key, got, *expect[key], may_be_zero=key in ("lse", "dbias"))


@pytest.mark.parametrize("lines", paragraphs("refusals.txt"), ids=lambda lines: lines[0][1])
def test_refusal(lines):
    case = dict(CASES[lines[0][2]])
    case["desc"], case["arrays"] = dict(case["desc"]), dict(case["arrays"])
    for kind, *words in lines[1:]:
        if kind == "desc":
            case["desc"].update(numbers(words))
        elif kind == "values":
            case["arrays"][words[0]] = np.array(words[1].split(","), np.int32)
        else:
            status, reason, field = words
    with pytest.raises(flashattn.FlashAttentionError) as caught:
        forward(case, options(case))
    error = caught.value
    assert (error.status, error.reason) == (Status["ERROR_" + status], Reason[reason]), str(error)
    assert error.field == field and field in str(error)


def numbers_of(name):
    """Numbers that every language makes alike."""
    shape = {"q": (2, 5, 4, 32), "k": (2, 9, 2, 32), "v": (2, 9, 2, 8)}[name]
    n = np.arange(np.prod(shape)) * 37 + (1 + "qkv".index(name)) * 11
    return ((n % 101 - 50) / 16).astype(np.float32).reshape(shape)


def fnv(array):
    """FNV-1a of an array's bytes."""
    value = 0x811C9DC5
    for byte in array.tobytes():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"


@pytest.mark.parametrize("lines", paragraphs("quantized.txt"), ids=lambda lines: lines[0][1])
def test_quantized(lines):
    """The bits of quantize()."""
    said = {kind: dict(word.split("=") for word in words) for kind, *words in lines[1:]}
    options = {name: "int8" if value == "I8" else int(value)
               for name, value in said.get("options", {}).items()}
    made = flashattn.quantize(**{name: numbers_of(name) for name in lines[0][2:]}, **options)
    there = {name: array for name, array in made._asdict().items() if array is not None}
    sums = said.get("sums", {})
    assert set(there) == set(said["bits"]) | set(sums)
    assert {name: fnv(there[name]) for name in said["bits"]} == said["bits"]
    for name, wanted in sums.items():
        assert abs(there[name].astype(np.float64)).sum() == pytest.approx(float(wanted), rel=1e-4)
