"""This library's work, through its C calls: everything is made before the clock runs."""
from __future__ import annotations

import pathlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from cases import Case
from flashattn._constants import Bias, Dtype, Feature, Layout, Mask, Op
from flashattn._library import ffi, lib, text
from memory import Array, Memory

Work = Callable[[], Any]
DTYPES = {"f32": int(Dtype.F32), "f16": int(Dtype.F16), "bf16": int(Dtype.BF16)}


class Refused(Exception):
    """The library's sentence."""


class Prepared(NamedTuple):
    work: Callable[[int], None]  # makes a call, on a GPU's stream
    kernel: str
    results: Dict[str, Array]  # o, or dq, dk, dv
    bytes: int  # least that the call moves
    workspace: int


def descriptor(case: Case) -> Dict[str, Any]:
    """The fields of flashattn_desc, but for where it is computed."""
    mask = int(Mask.CAUSAL) if case.causal else 0
    fields = dict(struct_size=ffi.sizeof("flashattn_desc"), dtype=DTYPES[case.dtype],
                  ops=int(Op.FORWARD), heads_q=case.heads, heads_kv=case.kv_heads,
                  dim_qk=case.dim, dim_v=case.value_dim, features=int(Feature.LSE),
                  softcap=case.softcap, dropout=case.dropout, determinism=int(case.repeatable))
    if case.op == "backward":
        fields["ops"] |= int(Op.BACKWARD)
    if case.window >= 0:
        mask |= int(Mask.WINDOW)
        fields["window_left"] = case.window
    if case.block_density < 1:
        mask |= int(Mask.BLOCKS)
        fields["block_q"] = fields["block_kv"] = 128
    if case.alibi:
        fields["bias"] = int(Bias.ALIBI)
    layout = Layout.VARLEN_Q if case.uneven else 0
    if case.page_size:
        layout |= Layout.PAGED_KV
    elif case.uneven:
        layout |= Layout.VARLEN_KV
    return {**fields, "mask": mask, "layout": int(layout), "page_size": case.page_size}


class FlashAttn:
    """A build of the library."""

    def __init__(self, name: str, library: Any, memory: Memory, threads: int) -> None:
        self.name, self.lib, self.memory, self.threads = name, library, memory, threads

    def check(self, status: int) -> None:
        if status:
            raise Refused(text(self.lib.flashattn_last_error(ffi.NULL, ffi.NULL)))

    def plan(self, fields: Dict[str, Any]) -> Any:
        made = ffi.new("flashattn_plan **")
        desc = ffi.new("flashattn_desc *", {**fields, "device": int(self.memory.device),
                                            "threads": self.threads})
        self.check(self.lib.flashattn_plan_create(desc, made))
        return ffi.gc(made[0], self.lib.flashattn_plan_destroy)

    def inputs(self, case: Case, arrays: Dict[str, Array]) -> Tuple[Dict[str, Any], Any]:
        """Fields of flashattn_inputs, and what they point to."""
        fields: Dict[str, Any] = {name: tensor(case, arrays[name]) for name in "qkv"}
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
            table = self.memory.of(rows, "i32")
            for name in "kv":
                dim = arrays[name].shape[-1]
                fields[name] = (pointer(arrays[name]), case.page_size * case.kv_heads * dim, dim,
                                case.kv_heads * dim)
            fields.update(page_table=pointer(table, "int32_t *"), pages=pages)
            keep.append(table)
        if case.alibi:
            slopes = self.memory.of(np.exp2(-8.0 * np.arange(1, case.heads + 1) / case.heads),
                                    "f32")
            fields["alibi_slopes"] = pointer(slopes, "float *")
            keep.append(slopes)
        if case.block_density < 1:
            blocks = (-(-case.seqlen_q // 128), -(-case.keys // 128))
            on = np.zeros(blocks[0] * blocks[1], np.uint8)
            on[np.random.default_rng(1).permutation(on.size)
               [: round(on.size * case.block_density)]] = 1
            mask = self.memory.of(on.reshape(blocks), "u8")
            fields["block_mask"] = pointer(mask, "uint8_t *")
            keep.append(mask)
        return fields, keep

    def prepare(self, case: Case, arrays: Dict[str, Array]) -> Prepared:
        """Raises Refused."""
        plan = self.plan(descriptor(case))
        if case.op == "merge":
            return self.merge(case, plan, arrays)
        fields, keep = self.inputs(case, arrays)
        shape = dict(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.keys)
        if case.uneven:
            shape.update(seqlen_q=max(case.lengths()), seqlen_kv=max(case.key_lengths()),
                         total_q=sum(case.lengths()),
                         total_kv=0 if case.page_size else sum(case.key_lengths()))
        o = self.memory.empty((*arrays["q"].shape[:3], case.value_dim), case.dtype, 0xFF)
        lse = self.memory.empty((case.batch, case.heads, case.seqlen_q), "f32", 0xFF)
        forward = ffi.new("flashattn_forward_args *", dict(
            struct_size=ffi.sizeof("flashattn_forward_args"), shape=shape, inputs=fields,
            o=tensor(case, o), lse=pointer(lse, "float *")))
        work, info = self.call(plan, Op.FORWARD, forward, self.lib.flashattn_forward)
        results = {"o": o}
        if case.op == "backward":
            work(0)
            results = {"d" + name: self.memory.empty(arrays[name].shape, case.dtype, 0xFF)
                       for name in "qkv"}
            backward = ffi.new("flashattn_backward_args *", dict(
                struct_size=ffi.sizeof("flashattn_backward_args"), shape=shape, inputs=fields,
                o=tensor(case, o), lse=pointer(lse, "float *"), dout=tensor(case, arrays["dout"]),
                **{name: tensor(case, array) for name, array in results.items()}))
            work, info = self.call(plan, Op.BACKWARD, backward, self.lib.flashattn_backward)
        work.keep = (*keep, o, lse, results, forward)  # type: ignore[attr-defined]
        # The library does not know lengths that lie on the device.
        least = int(case.least_bytes()) if case.uneven and case.decodes else info.bytes
        return Prepared(work, text(info.kernel), results, least, info.workspace)

    def merge(self, case: Case, plan: Any, arrays: Dict[str, Array]) -> Prepared:
        """Of fp32 parts."""
        rows = (case.batch, case.heads, case.seqlen_q)
        o = self.memory.empty((*arrays["o0"].shape[:3], case.value_dim), case.dtype, 0xFF)
        logs = [self.memory.normal(rows, "f32") for _ in arrays]
        lse = self.memory.empty(rows, "f32", 0xFF)
        tensors = ffi.new("flashattn_tensor[]", [tensor(case, part) for part in arrays.values()])
        pointers = ffi.new("float *[]", [pointer(part, "float *") for part in logs])
        args = ffi.new("flashattn_merge_args *", dict(
            struct_size=ffi.sizeof("flashattn_merge_args"), parts=case.parts,
            shape=dict(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_q),
            part_o=tensors, part_lse=pointers, part_dtype=DTYPES["f32"], o=tensor(case, o),
            lse=pointer(lse, "float *")))

        def work(stream: int) -> None:
            self.check(self.lib.flashattn_merge(plan, args, ffi.cast("void *", stream)))

        work.keep = (arrays, o, logs, lse, tensors, pointers)  # type: ignore[attr-defined]
        return Prepared(work, "flashattn_merge", {"o": o}, int(case.least_bytes()), 0)

    def call(self, plan: Any, op: int, args: Any, function: Any) -> Tuple[Any, Any]:
        shape = ffi.addressof(args, "shape")
        info = ffi.new("flashattn_plan_properties *",
                       {"struct_size": ffi.sizeof("flashattn_plan_properties")})
        self.check(self.lib.flashattn_plan_info(plan, int(op), shape, info))
        size = info.workspace
        workspace = self.memory.empty((max(size, 1),), "u8")
        address = pointer(workspace)
        check, cast = self.check, ffi.cast

        def work(stream: int) -> None:
            check(function(plan, args, address, size, cast("void *", stream)))

        work.raw = (function, plan, args, address, size)  # type: ignore[attr-defined]
        work.workspace = workspace  # type: ignore[attr-defined]
        return work, info


def builds(baselines: Optional[List[str]], memory: Memory, threads: int = 0) -> List[FlashAttn]:
    """This build, and those of --baseline. threads: on the CPU."""
    found = [FlashAttn("flashattn", lib, memory, threads)]
    for n, path in enumerate(baselines or []):
        name, _, file = path.rpartition("=")
        try:
            library = ffi.dlopen(str(pathlib.Path(file).resolve()))
        except OSError as error:
            raise SystemExit(f"bench: {error}") from None
        found.append(FlashAttn(name or f"base{n + 1 if n else ''}", library, memory, threads))
    return found


def pointer(array: Array, kind: str = "void *") -> Any:
    return ffi.cast(kind, array.address)


def tensor(case: Case, array: Array) -> Tuple[Any, int, int, int]:
    batch, head, seq = array.strides()
    return (pointer(array), 0 if case.uneven else batch, head, seq)
