"""Writes tests/data/cases.txt and cases.bin:  python -m tests.numerics.make_cases

cases.txt holds one paragraph per case:

    case NAME
    desc FIELD=VALUE ...                      flashattn_desc; struct_size and device are the
                                              runner's; an absent field is 0. ops=3: backward, too
    args FIELD=VALUE ...                      numbers of flashattn_args, bias.stride_batch among
                                              them; an absent stride is -1, another field 0
    array NAME DTYPE DIMS OFFSET              an input: the member's name in flashattn_args
    expect NAME f64 DIMS OFFSET TOLERANCE     o lse dq dk dv dbias dsink

DIMS: the last index is fastest. OFFSET: bytes into cases.bin, a multiple of 64, little-endian
there. A result passes when each element is within TOLERANCE of the float64 number; where that is
NaN the element is not written, where it is -inf it must be. o and dout have dtype_o, lse, dbias
and dsink are f32. Backward gets the o and lse of the runner's own
forward. Elements of inputs that belong to nobody are NaN, and outputs must be filled with NaN
before a call.
"""
import argparse
import math
import pathlib
import sys

import numpy as np

from . import capi
from .data import kept, make_data
from .device import CpuDevice
from .dtypes import NUMPY
from .harness import Call, Result
from .shared import SHARED
from .tolerance import Truth, absolute_limit, largest, lse_limit

FOLDER = pathlib.Path(__file__).parents[1] / "data"
ALIGNMENT = 64
DTYPE_NAMES = {dtype: name for name, dtype in dict(NUMPY, i32=np.dtype(np.int32)).items()}
HEADER_NAMES = {"cu_q": "cu_seqlens_q", "cu_kv": "cu_seqlens_kv", "slopes": "alibi_slopes"}
# Left out where equal, so that the defaults are tested too.
SAME_BY_DEFAULT = {"dtype_o": "dtype", "heads_kv": "heads_q", "dim_v": "dim_qk"}


class Expectation(Truth):
    """Collects what the reference says and how far a result may be off, instead of judging one."""

    def __init__(self, case, data):
        super().__init__(case, data)
        self.exact_of, self.limit_of = {}, {}
        self.check_forward(Result([]))
        if case.lse:
            self.exact_of["lse"] = [f.lse for f in self.exact]
            self.limit_of["lse"] = max((largest(lse_limit(f)) for f in self.exact), default=0.0)
        if case.backward:
            self.differentiate()
            self.check_backward(Result([]))

    def judge(self, name, out, exact, naive, noise, dtype, stored=None):
        del out, stored
        pooled = (np.concatenate([np.ravel(x) for x in part]) for part in (exact, naive, noise))
        self.exact_of[name] = exact
        self.limit_of[name] = absolute_limit(*pooled, dtype, self.factor)


def shapes_of(case, call):
    """The dimensions of every array that is not a plain list."""
    rows_q = (sum(case.cu_q),) if case.cu_q is not None else (case.batch, case.seqlen_q)
    rows_kv = (sum(case.cu_kv),) if case.cu_kv is not None else (case.batch, case.seqlen_kv)
    if case.page_size:
        rows_kv = (call.page_count, case.page_size)
    q, o = rows_q + (case.heads_q, case.dim_qk), rows_q + (case.heads_q, case.dim_v)
    k, v = rows_kv + (case.heads_kv, case.dim_qk), rows_kv + (case.heads_kv, case.dim_v)
    lse = rows_q[:-1] + (case.heads_q,) + rows_q[-1:]
    shapes = dict(q=q, k=k, v=v, o=o, dout=o, dq=q, dk=k, dv=v, lse=lse, dlse=lse)
    if case.page_size:
        shapes["page_table"] = (case.batch, -1)
    if case.alibi == "bh":
        shapes["slopes"] = call.data.slopes.shape
    if case.bias:
        shapes["bias"] = call.data.bias.shape
    if case.blocks:
        shapes["block_mask"] = call.data.block_mask.shape
    if case.dbias is not None:
        shapes["dbias"] = kept(case.dbias, case) + (case.seqlen_kv,)
    return shapes


def scatter(call, expectation):
    """The expected numbers as the arrays lie in memory, NaN where nothing is written; and the
    tensors among them that are not packed."""
    case, arrays = call.case, {}

    def spread(name, elements, indices):
        arrays[name] = np.full(elements, np.nan)
        for index, values in zip(indices, expectation.exact_of[name]):
            arrays[name][index] = values

    def spread_tensor(name, like, dtype):
        call.tensor(name, dtype, like=like)
        spread(name, len(call.buffers[name].host), call.places[name].index)

    spread_tensor("o", "o", case.dtype_o)
    if case.lse:
        call.lse_like("lse")
        spread("lse", len(call.buffers["lse"].host), call.lse_index())
    if not case.backward:
        return arrays, {}
    fields = {}
    for x in "qkv":
        spread_tensor("d" + x, x, case.dtype)
    if case.dbias is not None:
        fields["dbias"] = call.dbias_field()
        spread("dbias", len(call.buffers["dbias"].host), [call.dbias_index])
        arrays["dbias"][~call.buffers["dbias"].owned] = np.nan
    if case.dsink:
        arrays["dsink"] = np.ravel(expectation.exact_of["dsink"])
    return arrays, fields


def scalars(kind, fields):
    """A line "kind NAME=VALUE ...": numbers but 0, and strides but -1."""
    words = []
    for name, value in fields.items():
        if isinstance(value, dict):
            words += ["%s.%s=%d" % (name, stride, value[stride])
                      for stride in capi.PACKED if value[stride] != -1]
        elif isinstance(value, (int, float)) and value:
            words.append("%s=%s" % (name, "%.9g" % value if isinstance(value, float) else
                                    int(value)))
    return " ".join([kind] + words)


def round_up(x):
    """To two digits: the reference computes a little differently on other processors."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1) if x > 0 else 1.0
    return "%.2g" % (math.ceil(x / unit) * unit)


class Writer:
    def __init__(self):
        self.lines, self.blob = [], bytearray()

    def store(self, values, shape):
        """DIMS OFFSET of an array that is appended to the blob."""
        self.blob += b"\0" * (-len(self.blob) % ALIGNMENT)
        offset = len(self.blob)
        values = np.asarray(values).reshape(shape)
        self.blob += values.tobytes()
        return "%s %d" % (",".join(map(str, values.shape)), offset)

    def add(self, name, case):
        data = make_data(case)
        # The harness places the inputs; nothing is run.
        call = Call(case, CpuDevice(), data, plan=object())
        if case.backward:
            call.tensor("dout", case.dtype_o, data.dout, like="o")
            if case.dlse:
                call.lse_like("dlse", data.dlse)
        inputs = dict(call.buffers)
        expectation = Expectation(case, data)
        expected, outputs = scatter(call, expectation)
        desc = capi.descriptor(case, CpuDevice())
        del desc["struct_size"], desc["device"]
        for field, default in SAME_BY_DEFAULT.items():
            if desc[field] == desc[default]:
                del desc[field]
        fields = dict(call.sizes, **call.inputs, **outputs)
        self.lines += ["case " + name, scalars("desc", desc), scalars("args", fields)]
        shapes = shapes_of(case, call)
        for key, buffer in inputs.items():
            self.lines.append("array %s %s %s" % (
                HEADER_NAMES.get(key, key), DTYPE_NAMES[buffer.dtype],
                self.store(buffer.host, shapes.get(key, -1))))
        for key, values in expected.items():
            self.lines.append("expect %s f64 %s %s" % (
                key, self.store(values, shapes.get(key, -1)),
                round_up(expectation.limit_of[key])))
        self.lines.append("")


def make():
    """The two files' contents: text, bytes."""
    writer = Writer()
    for name, case in SHARED.items():
        writer.add(name, case)
    return "\n".join(writer.lines), bytes(writer.blob)


def main():
    argparse.ArgumentParser(description="writes tests/data/cases.txt and cases.bin").parse_args()
    text, blob = make()
    (FOLDER / "cases.txt").write_text(text, encoding="ascii")
    (FOLDER / "cases.bin").write_bytes(blob)
    print("%d cases, %d bytes" % (len(SHARED), len(blob)))


if __name__ == "__main__":
    sys.exit(main())
