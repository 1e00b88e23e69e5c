"""A check of the tests themselves: faults that attention kernels have had, put into a copy of the
GPU kernels one by one, which the emulator then runs. The comparison with the reference must fail,
or the kernel must stop, or such a fault would pass.

    python tests/kernel_mutations.py [NAME...]     --list names them

The copy (build/kernel-mutations) has few rows of the kernels' tables, so that it compiles soon.
Needs nvcc's folder on PATH or NVIDIA's packages, for CUDA's headers.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "kernel-mutations" / "source"
BUILD = COPY.parent / "build"
LIBRARY = "tests/emulator/libflashattn.so.0"
KERNELS = pathlib.Path("src") / "cuda" / "kernels"
# Rows of the tables that the copy keeps, of bf16 alone.
ROWS = {
    "sm80": ("fwd 16 64 64 1 128 3 plain", "fwd 16 64 64 1 64 3 runtime",
             "fwd 16 576 512 1 32 1 runtime 8 2", "decode 16 64 64 1 128 2 2 deep",
             "bwd 16 64 4 2 64 32 2 2 plain"),
    "sm90": ("fwd 16 64 64 3 128 plain", "mla 16 576 512", "mla_transposed 16 16",
             "bwd 16 64 128 plain"),
}
SECONDS = 120  # for one case; a kernel that runs on has a fault, too


def case(backend: str, **fields: object) -> Tuple[str, Dict[str, object]]:
    """backend, and the fields of Case: see tests/numerics/case.py."""
    return backend, dict(dict(heads_q=2, dim_qk=64, dtype="bf16"), **fields)


# Their lengths are none of the tiles' sizes, and memory past them holds NaN (tests/numerics).
CASES = {
    "sm90 forward": case("sm90", seqlen_q=200, seqlen_kv=700, heads_kv=1),
    "sm90 lengths": case("sm90", batch=2, seqlen_q=70, seqlen_kv=500, lens_kv=[333, 500]),
    "sm90 causal": case("sm90", seqlen_q=200, seqlen_kv=333, causal=True),
    "sm90 rising": case("sm90", seqlen_q=70, seqlen_kv=700, amplitude=6.0),
    "sm90 backward": case("sm90", seqlen_q=200, seqlen_kv=300, heads_kv=1, causal=True,
                          backward=True),
    "latent": case("sm90", batch=2, seqlen_q=3, seqlen_kv=500, lens_kv=[500, 333], heads_q=16,
                   heads_kv=1, dim_qk=576, dim_v=512, v_in_k=True, causal=True, splits=1),
    "latent rising": case("sm90", seqlen_q=1, seqlen_kv=700, heads_q=16, heads_kv=1, dim_qk=576,
                          dim_v=512, v_in_k=True, amplitude=14.0, splits=1),
    "records": case("sm90", batch=2, seqlen_q=1, seqlen_kv=500, lens_kv=[500, 333], heads_q=12,
                    heads_kv=1, dim_qk=576, dim_v=512, dtype_kv="f8", descale_dim=128,
                    strides="record", splits=1),
    "records rising": case("sm90", seqlen_q=1, seqlen_kv=700, heads_q=16, heads_kv=1, dim_qk=576,
                           dim_v=512, dtype_kv="f8", descale_dim=128, strides="record",
                           amplitude=3.0, splits=1),
    "sm80 forward": case("sm80", seqlen_q=130, seqlen_kv=333, heads_q=4, causal=True),
    "sm80 groups": case("sm80", batch=2, seqlen_q=130, seqlen_kv=150, heads_q=4, heads_kv=2),
    "sm80 window": case("sm80", seqlen_q=130, seqlen_kv=333, window=(100, 40)),
    "sm80 dropout": case("sm80", seqlen_q=70, seqlen_kv=200, dropout=0.3),
    "sm80 decode": case("sm80", batch=2, seqlen_q=1, seqlen_kv=900, lens_kv=[900, 517], heads_q=4,
                        heads_kv=1, splits=1, amplitude=3.0),
    "sm80 few queries": case("sm80", batch=2, seqlen_q=3, seqlen_kv=500, lens_kv=[500, 5],
                             heads_q=4, heads_kv=1, causal=True, splits=1),
    "sm80 splits": case("sm80", batch=2, seqlen_q=1, seqlen_kv=900, heads_q=4, heads_kv=1,
                        splits=3, sink=True),
    "sm80 cluster": case("sm80", seqlen_q=1, seqlen_kv=900, heads_q=4, heads_kv=1, amplitude=3.0),
    "sm80 backward": case("sm80", seqlen_q=150, seqlen_kv=200, heads_kv=1, causal=True,
                          backward=True),
}


class Mutation(NamedTuple):
    """`old`, a regular expression that file holds once, becomes `new`."""

    file: str
    old: str
    new: str
    cases: Sequence[str]


MUTATIONS: Dict[str, Mutation] = {
    # Waits, fences, phases.
    "Hopper: scores are read before their WGMMA is done": Mutation(
        "sm90/fwd_mainloop.cuh", r"ptx::wgmma_wait<1>\(\);", "", ["sm90 forward"]),
    "Hopper: V's stage is released before P V is done": Mutation(
        "sm90/fwd_mainloop.cuh", r"(void wait_pv\(.*\n *)ptx::wgmma_wait<0>\(\);", r"\1",
        ["sm90 forward"]),
    "Hopper: a consumer waits for the other phase of V's stage": Mutation(
        "sm90/fwd_mainloop.cuh", r"(void step\(.*\n *)const KvState v_state = kv_state_;",
        r"\1const KvState v_state{kv_state_.count + kStages};", ["sm90 forward"]),
    "Hopper: no fence between stores to dS and the WGMMAs that read it": Mutation(
        "sm90/bwd_warpgroup_base.cuh", r"(void \w+_ds\w*\(.*\n *)ptx::fence_async_proxy\(\);",
        r"\1", ["sm90 backward"]),
    "latent: no fence between stores of P and the WGMMAs that read it": Mutation(
        "sm90/mla_mainloop.cuh", r"ptx::fence_async_proxy\(\);(\n *ptx::named_arrive)", r"\1",
        ["latent"]),
    "latent: a part of K's stage is released before P V is done": Mutation(
        "sm90/mla_mainloop.cuh",
        r"(gemm_pv_own\(\);)(\n    \}[\s\S]*?)(release\(warpgroup_\);)", r"\1\3\2",
        ["latent"]),
    "latent: scores do not wait for the second part of K": Mutation(
        "sm90/mla_mainloop.cuh", r"storage_\.k\.consumer_wait\(own_state_, 1 - warpgroup_\);", "",
        ["latent"]),
    "portable: V is used before its copy is waited for": Mutation(
        "sm80/fwd.cuh", r"ptx::cp_async_wait<0>\(\);(\n.*::kV, v_tile_)", r"\1", ["sm80 forward"]),
    "decode: K's buffer is filled while warps still read it": Mutation(
        "sm80/decode.cuh",
        r"__syncthreads\(\);( *// all warps have read K\n)", r";\1",
        ["sm80 decode"]),
    "decode: a cluster's splits are used before they have arrived": Mutation(
        "sm80/decode_epilogue.cuh", r"merge_\.wait_for_splits\(\);", "", ["sm80 cluster"]),
    "decode: a cluster's splits keep their own maxima": Mutation(
        "sm80/decode_merge.cuh", r"0\.0f : x \* weight;", "0.0f : x;", ["sm80 cluster"]),
    # Masks and tails.
    "Hopper: the last tile that rows see in full is one too far": Mutation(
        "sm90/fwd_softmax.cuh", r"(if \(n < .* \|\| n) >= (warpgroup_tile\(\)\.full_end)",
        r"\1 > \2",
        ["sm90 causal"]),
    "Hopper: V past the last key is not cleared": Mutation(
        "sm90/fwd_mainloop.cuh", r"if \(!params_\.kv_has_tail \|\| .*\) (return;)", r"\1",
        ["sm90 lengths"]),
    "latent: V past the last key is not cleared": Mutation(
        "sm90/mla_mainloop.cuh", r"zero_v_tail\(n\);", ";", ["latent"]),
    "portable: the mask of a tile's right edge is left out": Mutation(
        "sm80/fwd.cuh", r"(columns\.begin < full\w+\.begin) \|\| columns\.end > full\w+\.end",
        r"\1", ["sm80 forward", "sm80 window"]),
    "decode: a row sees the key behind its last": Mutation(
        "sm80/decode.cuh", r"(visible\.end - visible\.begin)([,}])", r"\1 + 1\2",
        ["sm80 few queries"]),
    "preprocessing: the last query has no D": Mutation(
        "common/bwd_preprocess.cu",
        r"(lane < kRows && \w+ < sequence\.len\.q)(\) \{\n *lse = .*\n *if)",
        r"\1 - 1\2",
        ["sm80 backward"]),
    # Factors and sums.
    "Hopper: O is not rescaled when the base rises": Mutation(
        "sm90/fwd_mainloop.cuh", r"this->scale_rows\(o_, o_scale\);", "", ["sm90 rising"]),
    "latent: O is not rescaled when the base rises": Mutation(
        "sm90/mla_mainloop.cuh", r"o_\[i\] \*= o_scale\[i / 2 % 2\];", "o_[i] *= 1.0f;",
        ["latent rising"]),
    "latent: a base that overflowed stands": Mutation(
        "sm90/mla_mainloop.cuh", r"storage_\.redo = 1;", "storage_.redo = 0;", ["latent rising"]),
    "latent: row sums are of one warpgroup's tiles": Mutation(
        "sm90/mla_consumer.cuh", r"sums\[0\] \+ sums\[Config::kTileQ\]", "sums[0]", ["latent"]),
    "records: O keeps its unit": Mutation(
        "sm90/mla_transposed_mainloop.cuh", r"change_unit\(unit_of\(.*\);", "", ["records"]),
    "records: all columns have the first group's descales": Mutation(
        "sm90/mla_transposed_mainloop.cuh", r"factors \+ i \* 64 / kLatentDescaleDim .* \+ (x)",
        r"factors + \1", ["records"]),
    "records: O is not rescaled when the base rises": Mutation(
        "sm90/mla_transposed_consumer.cuh", r"if \(.*rescales\)\) scale_o_by_row\(\);", "",
        ["records rising"]),
    "Hopper: dQ lacks the scale": Mutation(
        "sm90/dq_convert.cuh", r"(dq\.x) \* scale", r"\1", ["sm90 backward"]),
    "decode: the row sum is not rescaled": Mutation(
        "sm80/decode_softmax.cuh", r"l_\[x / 2\]\[x % 2\] \*= rescale;", "", ["sm80 decode"]),
    "split-KV: a part weighs as much as its base alone": Mutation(
        "common/combine_rows.cuh", r"return x\.sum \* ptx::exp2", "return ptx::exp2",
        ["sm80 splits"]),
    "portable: dP is not less D": Mutation(
        "sm80/bwd.cuh", r"\n *x = subtract_delta<T>\(x, row\.x\);", "", ["sm80 backward"]),
    "portable: dK lacks the scale": Mutation(
        "sm80/bwd.cuh", r"(const float factor = .* \? \w+ : )params_\.problem\.scale;",
        r"\g<1>1.0f;", ["sm80 backward"]),
    # Indices.
    "portable: words of a dropout's numbers are exchanged": Mutation(
        "../device/dropout.cuh", r"n % 2 \* 2 \+ half\]", "half * 2 + n % 2]", ["sm80 dropout"]),
    "latent: every row of a tile is of its first query": Mutation(
        "sm90/mla_config.cuh", r"(const int32_t query = params\.by_group\.quotient\()row\)",
        r"\1first_row)", ["latent"]),
    "portable: all query heads of a sequence are of the first group": Mutation(
        "sm80/fwd_work_tile.cuh", r"first_head_ = kv_head_ \* params\.q_heads_per_kv_head",
        "first_head_ = kv_head_", ["sm80 groups"]),
}


def write(path: pathlib.Path, content: bytes) -> None:
    """Only what differs, so that ninja compiles what changed."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def short_table(path: pathlib.Path) -> str:
    """The kinds of a table, and the rows that the copy keeps."""
    rows = ROWS[path.parent.name]
    lines = path.read_text(encoding="utf-8").splitlines()
    missing = set(rows) - set(lines)
    if missing:
        raise SystemExit(f"{path.relative_to(ROOT)} has no row {missing.pop()!r}; mend tests/"
                         "kernel_mutations.py")
    kinds = [line for line in lines if line.startswith("kind ")]
    return "".join(f"{line}\n" for line in (*kinds, *(row.replace(" 16 ", " bf16 ")
                                                     for row in rows)))


def copy_tree() -> None:
    """The sources as they are now, but for the tables."""
    wanted = {}
    for top in ("include", "src", "tests", "bindings", "meson.build", "meson_options.txt"):
        paths = [ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*")
        for path in paths:
            parts = path.relative_to(ROOT)
            if path.is_file() and not {"__pycache__", "target", "data"} & set(parts.parts):
                wanted[parts] = path
    for parts, path in wanted.items():
        content = path.read_bytes()
        if path.name == "table.txt":
            content = short_table(path).encode()
        write(COPY / parts, content)
    for path in list(COPY.rglob("*")):
        if path.is_file() and path.relative_to(COPY) not in wanted:
            path.unlink()


def call(command: Sequence[str], env: Optional[Dict[str, str]] = None,
         seconds: int = 1800) -> Tuple[Optional[int], str]:
    """Its status, None where it took too long, and what it said."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds,
                              stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no end after {seconds} s"
    return done.returncode, done.stdout + done.stderr


def compile_copy() -> None:
    """Raises RuntimeError where it does not compile."""
    env = dict(os.environ)
    if not shutil.which("nvcc"):
        folders = pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")
        env["PATH"] += "".join(os.pathsep + str(folder) for folder in folders)
    if not (BUILD / "build.ninja").exists():
        shutil.rmtree(BUILD, ignore_errors=True)
        status, said = call(["meson", "setup", str(BUILD), str(COPY), "-Dpython=disabled",
                             "-Dtests=true", "-Dcuda=enabled", "-Demulator=true", "-Dcpu_isas="],
                            env)
        if status:
            raise RuntimeError(said[-3000:])
    status, said = call(["ninja", "-C", str(BUILD), LIBRARY], env)
    if status:
        raise RuntimeError(said[-3000:])


def failure(name: str) -> Optional[str]:
    """What a case says on the emulator; None: it passes."""
    backend, fields = CASES[name]
    env = {**os.environ, "FLASHATTN_LIBRARY": str(BUILD / LIBRARY), "FLASHATTN_BACKEND": backend,
           "FLASHATTN_EMULATOR_DEVICE": "90", "FLASHATTN_EMULATOR_SEED": "1",
           "LD_LIBRARY_PATH": str(BUILD / "tests" / "emulator"), "OPENBLAS_NUM_THREADS": "1",
           "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bindings" / "python")])}
    program = ("from tests.numerics.case import Case\nfrom tests.numerics.repro import verify\n"
               "from tests.numerics.device import open_device\n"
               f"verify(Case(**{fields!r}), open_device('cuda'))")
    status, said = call([sys.executable, "-c", program], env, SECONDS)
    if status == 0:
        return None
    lines = [line for line in said.strip().splitlines()
             if not line.startswith("repeat:") and "FLASHATTN_EMULATOR_SEED" not in line]
    stopped = [line for line in lines if line.startswith("emulator:")]  # nobody can go on
    return (stopped[:1] or lines[-1:] or [f"status {status}"])[0][:150]


def mutated(name: str) -> Tuple[str, str]:
    """The text of the mutation's file, and what it becomes."""
    mutation = MUTATIONS[name]
    text = (ROOT / KERNELS / mutation.file).read_text(encoding="utf-8")
    changed, count = re.subn(mutation.old, mutation.new, text)
    if count != 1:
        raise SystemExit(f"{name}: {mutation.file} has {count} times {mutation.old!r}; mend "
                         "tests/kernel_mutations.py")
    return text, changed


def found(name: str) -> Optional[str]:
    """What noticed the mutation; None: nothing did."""
    mutation = MUTATIONS[name]
    path = KERNELS / mutation.file
    text, changed = mutated(name)
    write(COPY / path, changed.encode())
    try:
        compile_copy()
        said = {name: failure(name) for name in mutation.cases}
        return next((f"{name}: {what}" for name, what in said.items() if what), None)
    finally:
        write(COPY / path, text.encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("name", nargs="*", help="only these")
    parser.add_argument("--list", action="store_true", help="names them")
    given = parser.parse_args()
    if given.list:
        print("\n".join(MUTATIONS))
        return 0
    names = given.name or list(MUTATIONS)
    copy_tree()
    compile_copy()
    for case_name in sorted({c for name in names for c in MUTATIONS[name].cases}):
        if said := failure(case_name):
            raise SystemExit(f"without a mutation {case_name} fails: {said}")
    missed = 0
    for name in names:
        what = found(name)
        missed += what is None
        print(f"{name}: {what or 'NOT FOUND'}", flush=True)
    print(f"{len(names) - missed} passed, {missed} failed, 0 skipped")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
