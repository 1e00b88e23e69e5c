"""The quantised cache of latent attention, LATENT_KV: three arrays, or one of records."""
import numpy as np

from . import capi
from .buffers import place, place_pages
from .case import Case
from .dtypes import NUMPY

# DeepSeek's record of 656 bytes is descale_dim=128 of it with strides="record".
BASE = Case(batch=2, seqlen_q=1, seqlen_kv=200, heads_q=16, heads_kv=1, dim_qk=576, dim_v=512,
            dtype="bf16", dtype_kv="f8", descale_dim=128, strides="record")
SMALL = BASE.replace(dim_qk=40, dim_v=32, descale_dim=16, heads_q=4, heads_kv=2, seqlen_kv=203)


def listed():
    """For the CPU: sizes that fit no vector, and everything that has to do with where rows lie."""
    yield BASE
    yield BASE.replace(heads_q=128, seqlen_q=2, causal=True, page_size=64, lens_kv=[200, 77])
    for n, (dim, dim_v, step) in enumerate([(2, 1, 1), (9, 8, 3), (48, 33, 16), (96, 64, 64),
                                            (100, 70, 7), (192, 128, 1000), (576, 512, 64)]):
        for dtype, kv in (("f32", "f8"), ("f16", "i8"), ("bf16", "f8")):
            yield SMALL.replace(dim_qk=dim, dim_v=dim_v, descale_dim=step, dtype=dtype, dtype_kv=kv,
                                strides=("record", "packed", "padded")[n % 3], seqlen_q=1 + 40 * n,
                                dtype_o="f32" if n % 2 else "")
    changes = [
        dict(page_size=1, lens_kv=[203, 65]), dict(page_size=3, seqlen_q=70, lens_kv=[1, 150]),
        dict(page_size=16, hidden=0.5), dict(page_size=64, splits=3, strides="padded"),
        dict(lens_kv=[0, 130], seqlen_q=37, sink=True), dict(starts_kv=[0, 77], causal=True),
        dict(cu_q=[70, 1, 33], cu_kv=[90, 257, 33], causal=True), dict(strides="bhsd", seqlen_q=9),
        dict(cu_q=[1, 4], cu_kv=[513, 77], strides="padded"), dict(window=(20, 3), seqlen_q=150),
        dict(tree=9, seqlen_q=9), dict(softcap=5.0, alibi="h"), dict(bias="f32", seqlen_q=20),
        dict(blocks=(16, 64), seqlen_q=130), dict(dropout=0.3, seqlen_q=50), dict(scale=-0.2),
        dict(dtype_o="f8"), dict(seqlen_kv=1500, splits=4, threads=2)]
    for change in changes:
        yield SMALL.replace(**change)


def cache_fields(call):
    """Fields of v, descale_latent and k."""
    case, data = call.case, call.data
    parts = {"v": (case.dtype_kv, data.v), "descale_latent": ("f32", data.descale_latent),
             "k": (case.dtype, data.k)}
    if case.strides.startswith("record"):
        return record_fields(call, parts)
    return {name: call.tensor(name, dtype, values, like="k" if name == "k" else "v")
            for name, (dtype, values) in parts.items()}


def record_fields(call, parts):
    """Fields of arrays whose rows lie together in one array of bytes."""
    case = call.case
    sizes, at = {}, {}
    end = 0
    for name, (dtype, _) in parts.items():
        sizes[name] = NUMPY[dtype].itemsize
        end = -(-end // 16) * 16 + 16 if case.strides == "record gaps" else -(-end // 4) * 4
        at[name] = end
        end += sizes[name] * {"v": case.dim_v, "k": case.columns_k,
                              "descale_latent": case.latent_descales}[name]
    record = -(-end // 16) * 16
    lengths = [case.length_kv(b) for b in range(case.batch)]
    if case.page_size:
        where, call.page_count = place_pages("bshd", lengths, case.page_size, case.heads_kv, record,
                                             call.page_lists, 16)
    else:
        where = place("bshd", [case.capacity_kv(b) for b in range(case.batch)], lengths,
                      [case.start_kv(b) for b in range(case.batch)], case.heads_kv, record,
                      case.cu_kv is not None)
    buffer = call.add("records", "u8", where.elements, skew=16)
    fields = {}
    for name, (dtype, values) in parts.items():
        for b, index in enumerate(where.index):
            contents = np.ascontiguousarray(values[b], NUMPY[dtype]).view(np.uint8)
            buffer.host[index[..., at[name]:at[name] + contents.shape[-1]]] = contents
        batch, head, seq = (stride // sizes[name] for stride in where.strides)
        fields[name] = dict(data=capi.pointer(buffer.address + at[name]), stride_batch=batch,
                            stride_head=head, stride_seq=seq)
    return fields
