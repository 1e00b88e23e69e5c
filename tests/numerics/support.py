"""What each backend computes, as flashattn_check says: tests/data/support.txt, and whether a test
that was refused may be skipped.

    python -m tests.numerics.support [--device cuda] [--write]

shows the table of this backend, a library on a device, and with --write puts it into the file. A
refusal of a plan is a skip only where the file lists it: in a row that the descriptor falls under,
with its reason and field. Any other is a failure: a kernel that was lost, or a new limit.
"""
import argparse
import os
import pathlib
import re
import sys
from typing import Any, Callable, Dict, List, NamedTuple

from . import capi

FILE = pathlib.Path(__file__).parents[1] / "data" / "support.txt"
COMMAND = "python -m tests.numerics.support --device %s --write"
HEAD = """\
What each backend refuses, and why. The columns: f32, f16, bf16; of each forward, then forward and
backward. Rows: a feature, heads of 64 and otherwise nothing; or the dimensions of heads. "." is
computed, "-" does not exist; letters are explained above each table. Written by
    python -m tests.numerics.support [--device cuda] --write
and compared by tests/numerics/test_support.py. A test that a backend refuses may be skipped where
this file lists the refusal, and is a failure elsewhere. all, sm80, sm90: GPU backends.
"""
# Where the sizes of kernels end.
DIMS = (64, 96, 128, 192, 256, 512, 576, 1024)
CAUSAL, WINDOW, CHUNK, TOP_LEFT, BLOCKS, TREE, PAGES = 1, 2, 4, 8, 16, 32, 64
ALIBI, DENSE = 1, 2
DTYPES = ("f32", "f16", "bf16")


class Row(NamedTuple):
    name: str
    changes: Dict[str, Any]  # of a plain descriptor
    holds: Callable[[Dict[str, Any]], Any]  # for a descriptor: whether it falls under the row


def bit(name: str, bits: int) -> Callable[[Dict[str, Any]], Any]:
    return lambda asked: asked.get(name, 0) & bits


def bucket(dim: int) -> int:
    return next((most for most in DIMS if dim <= most), 0)


def dims_of(asked: Dict[str, Any]):
    return asked["dim_qk"], asked.get("dim_v") or asked["dim_qk"]


def small_blocks(asked: Dict[str, Any]) -> Any:
    return bit("mask", BLOCKS)(asked) and (
        asked["block_q"] < 16 or asked["block_kv"] < 16 or asked["block_kv"] % 8)


def holds_f8(asked: Dict[str, Any]) -> Any:
    return asked.get("dtype_kv") == capi.DTYPES["f8"]


def is_deepseek(asked: Dict[str, Any]) -> Any:
    return (bit("layout", 8)(asked) and holds_f8(asked) and dims_of(asked) == (576, 512)
            and asked["descale_dim"] == 128)


def changes_scores(asked: Dict[str, Any]) -> Any:
    return (asked.get("softcap") or asked.get("scale", 0) < 0 or asked.get("bias")
            or asked.get("dropout") or bit("mask", BLOCKS)(asked))


def rows() -> List[Row]:
    dense = dict(bias=DENSE, dtype_bias=1)
    found = [
        Row("causal", dict(mask=CAUSAL), bit("mask", CAUSAL)),
        Row("aligned top left", dict(mask=CAUSAL | TOP_LEFT), bit("mask", TOP_LEFT)),
        Row("window", dict(mask=WINDOW, window_left=100), bit("mask", WINDOW)),
        Row("chunk", dict(mask=CHUNK, chunk=64), bit("mask", CHUNK)),
        Row("block mask", dict(mask=BLOCKS, block_q=64, block_kv=64), bit("mask", BLOCKS)),
        Row("blocks below 16, or of keys by 8", dict(mask=BLOCKS, block_q=5, block_kv=5),
            small_blocks),
        Row("tree", dict(mask=TREE, tree=64), bit("mask", TREE)),
        Row("tree, output of f32", dict(mask=TREE, tree=64, dtype_o=1),
            lambda asked: bit("mask", TREE)(asked) and asked.get("dtype_o") == 1),
        Row("tree, scores changed", dict(mask=TREE, tree=64, softcap=20.0),
            lambda asked: bit("mask", TREE)(asked) and changes_scores(asked)),
        Row("tree, cache of E4M3", dict(mask=TREE, tree=64, dtype_kv=capi.DTYPES["f8"]),
            lambda asked: bit("mask", TREE)(asked) and holds_f8(asked)),
        Row("packed queries", dict(layout=1), bit("layout", 1)),
        Row("packed keys", dict(layout=2), bit("layout", 2)),
        Row("pages of 16", dict(layout=4, page_size=16), bit("layout", 4)),
        Row("pages of no multiple of 16", dict(layout=4, page_size=3),
            lambda asked: bit("layout", 4)(asked) and asked["page_size"] % 16),
        Row("hidden pages", dict(layout=4, page_size=1, mask=PAGES), bit("mask", PAGES)),
        Row("softcap", dict(softcap=20.0), lambda asked: asked.get("softcap")),
        Row("scale below 0", dict(scale=-0.5), lambda asked: asked.get("scale", 0) < 0),
        Row("ALiBi", dict(bias=ALIBI), bit("bias", ALIBI)),
    ]
    for name in ("f32", "f16", "bf16", "u8"):
        found.append(Row("bias of " + name, dict(dense, dtype_bias=capi.DTYPES[name]),
                         lambda asked, number=capi.DTYPES[name]:
                         bit("bias", DENSE)(asked) and asked.get("dtype_bias") == number))
    found += [
        Row("gradient of the bias", dict(dense, features=capi.LSE | capi.DBIAS),
            bit("features", capi.DBIAS)),
        Row("sink", dict(features=capi.LSE | capi.SINK), bit("features", capi.SINK)),
        Row("gradient of the sink", dict(features=capi.LSE | capi.SINK | capi.DSINK),
            bit("features", capi.DSINK)),
        Row("gradient at the LSE", dict(features=capi.LSE | capi.DLSE),
            bit("features", capi.DLSE)),
        Row("dropout", dict(dropout=0.5), lambda asked: asked.get("dropout")),
        Row("output of f32", dict(dtype_o=1), lambda asked: asked.get("dtype_o") == 1),
        Row("RUN_TO_RUN", dict(determinism=1), lambda asked: asked.get("determinism") == 1),
        Row("BATCH_INVARIANT", dict(determinism=2), lambda asked: asked.get("determinism") == 2),
        Row("several splits", dict(splits=3), lambda asked: asked.get("splits", 0) > 1),
        Row("dim_qk of no multiple of 8", dict(dim_qk=57), lambda asked: dims_of(asked)[0] % 8),
        Row("dim_v of no multiple of 8", dict(dim_v=57), lambda asked: dims_of(asked)[1] % 8),
    ]
    for most in ((a, b) for a in DIMS for b in DIMS):
        found.append(Row("heads up to %d x %d" % most, dict(dim_qk=most[0], dim_v=most[1]),
                         lambda asked, most=most: tuple(map(bucket, dims_of(asked))) == most))
    found.append(Row("scores changed, heads above 256", dict(softcap=20.0, dim_qk=512, dim_v=512),
                     lambda asked: max(dims_of(asked)) > 256 and changes_scores(asked)))
    cache = dict(dtype_kv=capi.DTYPES["f8"])
    found += [
        Row("cache of E4M3", cache, holds_f8),
        Row("cache of E4M3, block mask", dict(cache, mask=BLOCKS, block_q=64, block_kv=64),
            lambda asked: holds_f8(asked) and bit("mask", BLOCKS)(asked)),
        Row("latent cache of DeepSeek", dict(cache, layout=8, descale_dim=128, dim_qk=576,
                                             dim_v=512), is_deepseek),
        Row("another latent cache", dict(cache, layout=8, descale_dim=16, dim_v=32),
            lambda asked: bit("layout", 8)(asked) and not is_deepseek(asked)),
    ]
    return found


ROWS = rows()


def column(asked: Dict[str, Any]) -> int:
    return 2 * (asked["dtype"] - 1) + (asked["ops"] & capi.BACKWARD > 0)


def answer(kind: int, row: Row, number: int) -> str:
    """".", "-", or a reason and a field."""
    ops = capi.FORWARD | (capi.BACKWARD if number % 2 else 0)
    asked = dict(struct_size=capi.ffi.sizeof("flashattn_desc"), device=kind, ops=ops,
                 dtype=capi.DTYPES[DTYPES[number // 2]], heads_q=4, heads_kv=2, dim_qk=64,
                 dim_v=64, features=capi.LSE)
    asked.update(row.changes)
    try:
        capi.check(capi.library().flashattn_check(capi.ffi.new("flashattn_desc *", asked),
                                                  capi.ffi.NULL))
    except capi.Refused as refused:
        return says(refused) if refused.status == capi.UNSUPPORTED else "-"
    return "."


def says(refused: capi.Refused) -> str:
    return "%s, %s" % (capi.Reason(refused.reason).name, refused.field)


def backend(kind: int) -> str:
    """The GPU backends that may be chosen, and the device's compute capability."""
    if kind == 0:
        return "cpu"
    found = capi.device_properties(kind)
    backend = os.environ.get("FLASHATTN_BACKEND") or "all"
    return "%s on %d.%d" % (backend, *divmod(found.compute_capability, 10))


def has_hopper(device: Any) -> bool:
    """Whether the Hopper kernels compute what it can: not by what it does compute."""
    return backend(device.kind) in ("all on 9.0", "sm90 on 9.0")


def table(kind: int) -> str:
    """The section of a backend, from its own mouth."""
    letters: Dict[str, str] = {}
    lines = []
    for row in ROWS:
        cells = [answer(kind, row, number) for number in range(2 * len(DTYPES))]
        for cell in cells:
            if len(cell) > 1:
                letters.setdefault(cell, "abcdefghijklm"[len(letters)])
        marks = " ".join(letters.get(cell, cell) for cell in cells)
        lines.append("%-34s %s" % (row.name, marks))
    legend = ["%s: %s" % (letter, reason) for reason, letter in letters.items()]
    return "\n".join(["[%s]" % backend(kind), *legend, *lines, ""])


def sections() -> Dict[str, str]:
    """The file's, by backend."""
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    return {part[1:part.index("]")]: part.rstrip("\n") + "\n"
            for part in re.split(r"^(?=\[)", text, flags=re.M)[1:]}


def is_listed(section: str, asked: Dict[str, Any], reason: str) -> bool:
    """Whether a section says that a descriptor is refused so."""
    legend = dict(re.findall(r"^([a-z]): (.*)$", section, re.M))
    cells = {line[:34].rstrip(): line[35:].split() for line in section.splitlines()}
    return asked["dtype"] <= len(DTYPES) and any(
        row.holds(asked) and legend.get(cells[row.name][column(asked)]) == reason
        for row in ROWS if row.name in cells)


def may_be_skipped(refused: capi.Refused) -> bool:
    """Of a refused plan: whether this backend's section lists it."""
    if refused.asked is None or refused.status != capi.UNSUPPORTED:
        return False
    section = sections().get(backend(refused.asked["device"]), "")
    return is_listed(section, refused.asked, says(refused))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--write", action="store_true", help="put the table into the file")
    chosen = parser.parse_args()
    made = table(int(chosen.device == "cuda"))
    sys.stdout.write(made)
    if chosen.write:
        kept = dict(sections(), **{made[1:made.index("]")]: made})
        FILE.write_text("\n".join([HEAD, *(kept[name] for name in sorted(kept))]),
                        encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
