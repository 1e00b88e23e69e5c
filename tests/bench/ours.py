"""This library's work, through its C calls: everything is made before the clock runs."""
from __future__ import annotations

import ctypes
import functools
import pathlib
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from cases import Case
from flashattn._constants import Bias, Dtype, Feature, Layout, Mask, Op
from flashattn import _library
from memory import Array, Memory

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings"))
from generator import model  # noqa: E402

Work = Callable[[], Any]
DTYPES = {"f32": int(Dtype.F32), "f16": int(Dtype.F16), "bf16": int(Dtype.BF16),
          "f8": int(Dtype.F8E4M3), "i8": int(Dtype.I8)}


class Refused(Exception):
    """The library's message."""


class Prepared(NamedTuple):
    work: Callable[[int], None]  # makes a call, on a GPU's stream
    kernel: str
    results: Dict[str, Array]  # o, or dq, dk, dv
    bytes: int  # least that the call moves
    workspace: int


def blocks_of(case: Case) -> np.ndarray:
    """A block mask that all sequences and heads share: uint8 (blocks of queries, of keys)."""
    shape = (-(-case.seqlen_q // case.block_size), -(-case.keys // case.block_size))
    on = np.zeros(shape[0] * shape[1], np.uint8)
    on[np.random.default_rng(1).permutation(on.size)[: round(on.size * case.block_density)]] = 1
    return on.reshape(shape)


def descriptor(case: Case) -> Dict[str, Any]:
    """The fields of flashattn_desc, but for where it is computed."""
    mask = int(Mask.CAUSAL) if case.causal else 0
    fields = dict(dtype=DTYPES[case.dtype], ops=int(Op.FORWARD), heads_q=case.heads,
                  heads_kv=case.kv_heads, dim_qk=case.dim, dim_v=case.value_dim,
                  features=int(Feature.LSE), softcap=case.softcap, dropout=case.dropout,
                  determinism=int(case.repeatable))
    if case.dtype_kv:
        fields["dtype_kv"] = DTYPES[case.dtype_kv]
    if case.dtype_o != case.dtype:
        fields["dtype_o"] = DTYPES[case.dtype_o]
    if case.op == "backward":
        fields["ops"] |= int(Op.BACKWARD)
    if case.descale_block:
        fields["descale_block"] = case.descale_block
    if case.window >= 0:
        mask |= int(Mask.WINDOW)
        fields["window_left"] = case.window
    if case.block_density < 1:
        mask |= int(Mask.BLOCKS)
        mask |= int(Mask.BLOCK_LISTS) if case.block_lists else 0
        fields["block_q"] = fields["block_kv"] = case.block_size
    if case.tokens:
        mask |= int(Mask.PAGES)
    if case.alibi:
        fields["bias"] = int(Bias.ALIBI)
    if case.bias:
        fields["bias"] = fields.get("bias", 0) | int(Bias.DENSE)
        fields["dtype_bias"] = DTYPES[case.bias]
    if case.dbias:
        fields["features"] |= int(Feature.DBIAS)
    layout = Layout.VARLEN_Q if case.uneven else 0
    if case.page_size:
        layout |= Layout.PAGED_KV
    elif case.uneven:
        layout |= Layout.VARLEN_KV
    if case.latent and case.dtype_kv:
        layout |= Layout.LATENT_KV
        fields["descale_dim"] = 128
    return {**fields, "mask": mask, "layout": int(layout), "page_size": case.page_size}


class FlashAttn:
    """A build of the library. Its calls are made of the members of flashattn_args, each a number, a
    pointer or the four numbers of a tensor."""

    ffi = _library.ffi

    def __init__(self, name: str, library: Any, memory: Memory, threads: int) -> None:
        self.name, self.lib, self.memory, self.threads = name, library, memory, threads

    def check(self, status: int) -> None:
        if status:
            null = self.ffi.NULL
            raise Refused(self.text(self.lib.flashattn_last_error(null, null)))

    def text(self, pointer: Any) -> str:
        return self.ffi.string(pointer).decode()

    def sized(self, structure: str, fields: Dict[str, Any]) -> Any:
        return self.ffi.new(structure + " *", dict(fields, struct_size=self.ffi.sizeof(structure)))

    def plan(self, fields: Dict[str, Any]) -> Any:
        made = self.ffi.new("flashattn_plan **")
        desc = self.sized("flashattn_desc", {**fields, "device": int(self.memory.device),
                                             "threads": self.threads})
        self.check(self.create(desc, made))
        return self.ffi.gc(made[0], self.lib.flashattn_plan_destroy)

    def pointer(self, array: Array, kind: str = "void *") -> Any:
        return self.ffi.cast(kind, array.address)

    def tensor(self, case: Case, array: Array) -> Tuple[Any, int, int, int]:
        batch, head, seq = array.strides()
        return (self.pointer(array), 0 if case.uneven else batch, head, seq)

    # ---- what other versions do otherwise

    def create(self, desc: Any, made: Any) -> int:
        return self.lib.flashattn_plan_create(desc, made, self.ffi.NULL)

    def args(self, op: int, fields: Dict[str, Any]) -> Any:
        del op
        return self.sized("flashattn_args", fields)

    def sizes(self, args: Any) -> Any:
        """What plan_info and workspace_size are asked with."""
        return args

    def merge_args(self, fields: Dict[str, Any]) -> Any:
        return self.sized("flashattn_merge_args", fields)

    # ---- cases

    def inputs(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Dict[str, Any], Any]:
        """Inputs in flashattn_args, and what they point to."""
        pointer = self.pointer
        cache = [name for name in ("k", "v", "descale_latent") if name in arrays]
        fields: Dict[str, Any] = {name: self.tensor(case, arrays[name]) for name in ("q", *cache)}
        keep: List[Any] = [arrays]
        if case.uneven:
            lengths = [self.memory.of(np.array(numbers), "i32")
                       for numbers in (*case.starts(), case.key_lengths())]
            names = ("cu_seqlens_q", "lens_kv" if case.page_size else "cu_seqlens_kv")
            used = (lengths[0], lengths[2 if case.page_size else 1])
            fields.update({name: pointer(x, "int32_t *") for name, x in zip(names, used)})
            keep.append(lengths)
        if case.page_size:
            # The same memory, read as a pool of pages, which the sequences share out at random.
            counts = [n // case.page_size for n in case.key_lengths()]
            pages = sum(counts)
            numbers = np.random.default_rng(0).permutation(pages)
            rows = np.zeros((case.batch, max(counts)), np.int32)
            for row, own in zip(rows, np.split(numbers, np.cumsum(counts)[:-1])):
                row[:len(own)] = own
            if case.tokens:
                pages = case.tokens
                rows = np.random.default_rng(0).integers(pages, size=rows.shape, dtype=np.int32)
            table = self.memory.of(rows, "i32")
            for name in cache:
                _, head, seq = arrays[name].strides()
                fields[name] = (pointer(arrays[name]), case.page_size * seq, head, seq)
            fields.update(page_table=(pointer(table), -1, -1, -1), pages=pages)
            keep.append(table)
        if case.alibi:
            slopes = self.memory.of(np.exp2(-8.0 * np.arange(1, case.heads + 1) / case.heads),
                                    "f32")
            fields["alibi_slopes"] = (pointer(slopes), 0, -1, -1)
            keep.append(slopes)
        if case.descale_block:
            blocks = -(-max(case.seqlen_q, case.keys) // case.descale_block)
            ones = self.memory.of(np.ones((case.kv_heads, blocks)), "f32")
            fields.update({f"descale_{x}": (pointer(ones), 0, blocks, 1) for x in "qkv"})
            keep.append(ones)
        if case.bias:
            fields["bias"] = (pointer(arrays["bias"]), 0, -1, -1)
        if case.block_density < 1:
            on = blocks_of(case)
            if case.block_lists:
                counts, (rows, columns) = on.sum(-1), on.shape
                index = np.full((rows, columns), -1, np.int32)
                index[np.arange(columns) < counts[:, None]] = np.nonzero(on)[1]
                mask, ends = self.memory.of(index, "i32"), self.memory.of(counts, "i32")
                fields.update(block_index=(pointer(mask), 0, 0, columns), block_entries=columns,
                              block_end=(pointer(ends), 0, 0, 1))
                keep.append(ends)
            else:
                mask = self.memory.of(on, "u8")
                fields["block_mask"] = (pointer(mask), 0, 0, -1)
            keep.append(mask)
        return fields, keep

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Prepared:
        """Raises Refused."""
        plan = self.plan(descriptor(case))
        if case.op == "merge":
            return self.merge(case, plan, arrays)
        fields, keep = self.inputs(case, arrays)
        fields.update(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.keys)
        if case.uneven:
            fields.update(seqlen_q=max(case.lengths()), seqlen_kv=max(case.key_lengths()),
                          total_q=sum(case.lengths()),
                          total_kv=0 if case.page_size else sum(case.key_lengths()))
        o = self.memory.empty((*arrays["q"].shape[:3], case.value_dim), case.dtype_o, 0xFF)
        lse = self.memory.empty((case.batch, case.heads, case.seqlen_q), "f32", 0xFF)
        fields.update(o=self.tensor(case, o), lse=self.pointer(lse, "float *"))
        forward = self.args(Op.FORWARD, fields)
        work, info = self.call(plan, Op.FORWARD, forward, self.lib.flashattn_forward)
        results = {"o": o}
        if case.op == "backward":
            work(0)
            results = {"d" + name: self.memory.empty(arrays[name].shape, case.dtype, 0xFF)
                       for name in "qkv"}
            fields["dout"] = self.tensor(case, arrays["dout"])
            fields.update({name: self.tensor(case, array) for name, array in results.items()})
            if case.dbias:
                results["dbias"] = self.memory.empty(arrays["bias"].shape, "f32", 0xFF)
                fields["dbias"] = (self.pointer(results["dbias"]), 0, -1, -1)
            backward = self.args(Op.BACKWARD, fields)
            work, info = self.call(plan, Op.BACKWARD, backward, self.lib.flashattn_backward)
        work.keep = (*keep, o, lse, results, forward)  # type: ignore[attr-defined]
        # The library does not know lengths that lie on the device, nor what v is a view of.
        known = not (case.latent or case.uneven and case.decodes)
        least = info.bytes if known else int(case.least_bytes())
        return Prepared(work, self.text(info.kernel), results, least, info.workspace)

    def merge(self, case: Case, plan: Any, arrays: Dict[str, Array]) -> Prepared:
        """Of fp32 parts."""
        rows = (case.batch, case.heads, case.seqlen_q)
        o = self.memory.empty((*arrays["o0"].shape[:3], case.value_dim), case.dtype, 0xFF)
        logs = [self.memory.normal(rows, "f32") for _ in arrays]
        lse = self.memory.empty(rows, "f32", 0xFF)
        tensors = self.ffi.new("flashattn_tensor[]", [self.tensor(case, part)
                                                      for part in arrays.values()])
        pointers = self.ffi.new("float *[]", [self.pointer(part, "float *") for part in logs])
        args = self.merge_args(dict(
            parts=case.parts, batch=case.batch, seqlen_q=case.seqlen_q, part_o=tensors,
            part_lse=pointers, dtype_part=DTYPES["f32"], o=self.tensor(case, o),
            lse=self.pointer(lse, "float *")))

        def work(stream: int) -> None:
            self.check(self.lib.flashattn_merge(plan, args, self.ffi.cast("void *", stream)))

        work.keep = (arrays, o, logs, lse, tensors, pointers)  # type: ignore[attr-defined]
        return Prepared(work, "flashattn_merge", {"o": o}, int(case.least_bytes()), 0)

    def call(self, plan: Any, op: int, args: Any, function: Any) -> Tuple[Any, Any]:
        info = self.sized("flashattn_plan_properties", {})
        self.check(self.lib.flashattn_plan_info(plan, int(op), self.sizes(args), info))
        size = info.workspace
        workspace = self.memory.empty((max(size, 1),), "u8")
        address = self.pointer(workspace)
        check, cast = self.check, self.ffi.cast

        def work(stream: int) -> None:
            check(function(plan, args, address, size, cast("void *", stream)))

        work.raw = (function, plan, args, address, size)  # type: ignore[attr-defined]
        work.workspace = workspace  # type: ignore[attr-defined]
        return work, info


class Before(FlashAttn):
    """A build of 0.1, by the header of its time."""

    HEADER = ROOT / "tests" / "abi" / "v0.1" / "flashattn.h"
    RENAMED = {"dtype_part": "part_dtype"}

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.ffi = Before.frozen()

    @staticmethod
    @functools.lru_cache(maxsize=None)
    def frozen() -> Any:
        import cffi

        declared = cffi.FFI()
        declared.cdef(model.read(Before.HEADER.read_text(encoding="utf-8")).cdef)
        return declared

    def create(self, desc: Any, made: Any) -> int:
        return self.lib.flashattn_plan_create(desc, made)

    def args(self, op: int, fields: Dict[str, Any]) -> Any:
        return self.nested("flashattn_forward_args" if op == Op.FORWARD else
                           "flashattn_backward_args", fields)

    def sizes(self, args: Any) -> Any:
        return self.ffi.addressof(args, "shape")

    def merge_args(self, fields: Dict[str, Any]) -> Any:
        return self.nested("flashattn_merge_args", fields)

    def nested(self, structure: str, fields: Dict[str, Any]) -> Any:
        """Sizes and inputs were structures of their own, and tensors without q's shape pointers,
        whose strides of zero meant packed rows of the same numbers for all."""
        made = self.sized(structure, {})
        owners = [made[0]] + [getattr(made, name) for name in ("shape", "inputs")
                              if hasattr(made, name)]
        members = {name: (owner, field.type) for owner in reversed(owners)
                   for name, field in self.ffi.typeof(owner).fields}
        for name, value in fields.items():
            owner, kind = members[self.RENAMED.get(name, name)]
            if isinstance(value, tuple) and kind.kind == "pointer":
                value = self.ffi.cast(kind, value[0])
            setattr(owner, self.RENAMED.get(name, name), value)
        return made


def builds(baselines: Optional[List[str]], memory: Memory, threads: int = 0) -> List[FlashAttn]:
    """This build, and those of --baseline, of this version or of 0.1. threads: on the CPU."""
    found = [FlashAttn("flashattn", _library.lib, memory, threads)]
    for n, path in enumerate(baselines or []):
        name, _, file = path.rpartition("=")
        path = str(pathlib.Path(file).resolve())
        try:
            version = ctypes.CDLL(path).flashattn_version() // 100
        except (OSError, AttributeError) as error:
            raise SystemExit(f"bench: {error}") from None
        kinds = {_library.HEADER_VERSION // 100: FlashAttn, 1: Before}
        if version not in kinds:
            raise SystemExit(f"bench: {path} has version {version // 100}.{version % 100}, whose "
                             "header is not here; give a build of this version or of 0.1")
        kind = kinds[version]
        library = (kind.ffi if kind is FlashAttn else Before.frozen()).dlopen(path)
        found.append(kind(name or f"base{n + 1 if n else ''}", library, memory, threads))
    return found
