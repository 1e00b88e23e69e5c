"""Cases of E4M3: q, k and v, or a cache beside wider queries, of 8 bits; and of caches of I8."""
import random

from hypothesis import strategies as st

from .case import Case
from .randomcases import cases

BASE = Case(batch=2, seqlen_q=37, seqlen_kv=203, heads_q=4, heads_kv=2, dim_qk=32, dtype="f8",
            dtype_o="bf16", descales="bht")


def in_eight_bits(case, seed):
    """A random case with 8-bit inputs: all of them, or k and v beside the case's own queries."""
    draw = random.Random("f8 %d" % seed)
    changes = dict(dtype_kv=draw.choice(["f8", "f8", "i8"]))
    if draw.random() < 0.6:
        changes["dtype"] = "f8"
        changes["dtype_o"] = draw.choice(["f32", "f16", "bf16"] + ["f8"] * (not case.backward))
    elif not case.backward and draw.random() < 0.2:
        changes["dtype_o"] = "f8"
    if case.backward and draw.random() < 0.3:
        changes["dtype_grad"] = draw.choice(["f32", "f16", "bf16"])
    changes["descales"] = draw.choice([None, "", "bh", "bht", "bht", "t"])
    changes["descale_block"] = draw.choice([0, 1, 7, 64, 128])
    if changes.get("dtype_o") == "f8":
        changes["scale_o"] = draw.random() < 0.8
    if not case.backward and draw.random() < 0.5:
        changes["amax_o"] = draw.choice(["bh", "b", "h", ""])
    if changes.get("dtype") != "f8" and not case.backward and case.dim_v < case.dim_qk and \
            draw.random() < 0.4:
        changes.update(descale_dim=draw.choice([1, 7, 16, 128]), descales=None, descale_block=0,
                       amax_o=None, strides=draw.choice([case.strides, "record"]))
    # An o of 8 bits tells large results from small ones only.
    return case.replace(**changes)


def random_cases():
    """A strategy."""
    return st.builds(in_eight_bits, cases(), st.integers(0, 2 ** 16))


def listed():
    yield BASE
    for n, (dim, dim_v) in enumerate([(1, 3), (8, 8), (16, 33), (64, 64), (96, 128), (128, 128),
                                      (192, 128), (256, 256), (512, 111)]):
        for rows in (1, 3, 113):
            yield BASE.replace(dim_qk=dim, dim_v=dim_v, seqlen_q=rows, causal=n % 2 == 0,
                               descale_block=(0, 64, 128)[n % 3],
                               dtype_o=("f32", "f16", "bf16")[n % 3])
    for block in (0, 1, 5, 64, 128, 1000):
        yield BASE.replace(descale_block=block, backward=True, seqlen_q=203)
        for n, kv in enumerate(("f8", "i8")):
            yield BASE.replace(descale_block=block, seqlen_q=2 - n, seqlen_kv=900 + n,
                               dtype="bf16", dtype_kv=kv)
        yield BASE.replace(descale_block=block, seqlen_q=1, seqlen_kv=1500, splits=4, threads=2,
                           dtype_o="f8", scale_o=True, amax_o="h")
    for descales in (None, "", "b", "h", "t", "bh"):
        yield BASE.replace(descales=descales, descale_block=64, seqlen_q=150, amax_o="bh")
    features = [
        dict(window=(20, 3)), dict(chunk=50), dict(blocks=(16, 64)), dict(softcap=5.0),
        dict(alibi="bh"), dict(bias="f32"), dict(bias="u8", bias_empty=0.2), dict(sink=True),
        dict(dropout=0.3), dict(scale=-0.2), dict(top_left=True, causal=True),
        dict(cu_q=[70, 1, 33], cu_kv=[90, 257, 33]), dict(lens_q=[3, 37], lens_kv=[203, 0]),
        dict(starts_kv=[0, 77])]
    for n, more in enumerate(features):
        yield BASE.replace(descale_block=64, backward=True, dtype_o=("f32", "bf16")[n % 2], **more)
        yield BASE.replace(descale_block=64, dtype_o="f8", scale_o=True, amax_o="", **more)
        yield BASE.replace(dtype=("f16", "bf16", "f32")[n % 3], dtype_kv=("f8", "i8")[n % 2],
                           backward=True, descale_block=7,
                           dtype_grad=("", "f32")[n % 2], **more)
    for n, page_size in enumerate((1, 3, 16, 64)):
        for dtype in ("f8", "bf16", "f16", "f32"):
            yield BASE.replace(dtype=dtype, dtype_kv="i8" if dtype == "f16" else "f8",
                               page_size=page_size, causal=True,
                               seqlen_q=(1, 4, 40)[n % 3], lens_kv=[203, 130],
                               descale_block=(0, 64)[n % 2], dtype_o="f32",
                               hidden=0.5 if n % 2 and dtype != "f8" else None)
    for n, dtype in enumerate(("f8", "bf16", "f16", "f32")):
        yield BASE.replace(dtype=dtype, dtype_kv=("i8", "f8")[n % 2], tree=70,
                           page_size=16 * (n % 2), causal=True,
                           seqlen_q=(5, 70)[n // 2], lens_kv=[203, 40], descale_block=64)
    for dim, dim_v in ((3, 1), (64, 64), (96, 128), (128, 111), (256, 256), (576, 512)):
        for rows, dtype in ((1, "f32"), (3, "bf16"), (113, "f16")):
            yield BASE.replace(dim_qk=dim, dim_v=dim_v, seqlen_q=rows, heads_q=8, dtype=dtype,
                               dtype_kv="i8", dtype_o="f32", descale_block=rows)
    for mode in ("bhsd", "sbhd", "qkv", "padded", "broadcast"):
        yield BASE.replace(strides=mode, backward=True, descale_block=64)
        yield BASE.replace(strides=mode, seqlen_q=1, dtype="f16", dtype_kv="f8", descale_block=64)
        yield BASE.replace(strides=mode, seqlen_q=1, dtype="f32", dtype_kv="i8", descale_block=1)
