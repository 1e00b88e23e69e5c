"""Configurations drawn from everything that goes together."""
import random

from .case import Case

LENGTHS = (0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 63, 64, 65, 97, 113, 127, 129, 203)
DIMS = (1, 3, 8, 16, 20, 32, 40, 59, 64, 72, 96, 128, 160)
# Many tiles, and what tensor cores compute.
LARGE_LENGTHS = (0, 1, 5, 64, 127, 129, 255, 257, 511, 513, 700, 1023, 1025, 1500, 2049)
LARGE_DIMS = (8, 32, 64, 64, 80, 96, 128, 128, 192, 256, 256)


def layout(draw, fields, lengths):
    kind = draw.choice(["dense", "dense", "varlen", "varlen_q", "varlen_kv", "lens", "paged"])
    batch = draw.randint(1, 4)
    rows = [draw.choice(lengths) for _ in range(batch)]
    keys = [draw.choice(lengths) for _ in range(batch)]
    if draw.random() < 0.3:
        keys = rows
    fields.update(batch=batch, seqlen_q=max(rows), seqlen_kv=max(keys))
    if kind in ("varlen", "varlen_q"):
        fields["cu_q"] = rows
    if kind in ("varlen", "varlen_kv"):
        fields["cu_kv"] = keys
    if kind == "lens" or draw.random() < 0.15:
        fields["lens_q"] = [draw.randint(0, n) if "cu_q" in fields else n for n in rows]
    if kind in ("lens", "paged") or draw.random() < 0.15:
        fields["lens_kv"] = [draw.randint(0, n) if "cu_kv" in fields else n for n in keys]
    if kind == "paged":
        fields["page_size"] = draw.choice([1, 2, 3, 16, 64, 100])
        fields["seqlen_q"] = min(fields["seqlen_q"], draw.choice([1, 2, 8, 300]))
        if "lens_q" in fields:
            fields["lens_q"] = [min(n, fields["seqlen_q"]) for n in fields["lens_q"]]


def starts(draw, case):
    return [draw.choice([0, draw.randint(0, case.length_kv(b))]) for b in range(case.batch)]


def masks(draw, fields):
    fields["causal"] = draw.random() < 0.5
    fields["top_left"] = draw.random() < 0.2
    if draw.random() < 0.3:
        fields["window"] = (draw.choice([-1, 0, 1, 7, 31, 64, 100]),
                            draw.choice([-1, 0, 1, 7, 31, 64, 100]))
    if draw.random() < 0.15:
        fields["chunk"] = draw.choice([1, 3, 16, 33, 64, 100])
    if draw.random() < 0.2:
        fields["blocks"] = (draw.choice([1, 5, 16, 64, 100]), draw.choice([1, 5, 16, 64, 100]))
        fields["block_dims"] = draw.choice(["bh", "h", "b", ""])


def scores(draw, fields, backward):
    def subset():
        return "".join(c for c in "bhr" if draw.random() < 0.6)

    if draw.random() < 0.2:
        fields["softcap"] = draw.choice([0.7, 5.0, 30.0])
    if draw.random() < 0.2:
        fields["scale"] = draw.choice([0.05, 0.3, -0.2])
    if draw.random() < 0.25:
        fields["alibi"] = draw.choice(["h", "bh"])
    if draw.random() < 0.35:
        fields["bias"] = draw.choice(["f32", "f16", "bf16", "u8", "u8"])
        fields["bias_dims"] = subset()
        fields["bias_empty"] = draw.choice([0.0, 0.0, 0.2])
        if backward and fields["bias"] != "u8" and draw.random() < 0.7:
            fields["dbias"] = draw.choice([fields["bias_dims"], subset()])
    if draw.random() < 0.25:
        fields["sink"] = True
        fields["dsink"] = backward
    if draw.random() < 0.25:
        fields["dropout"] = draw.choice([0.1, 0.5, 0.9])
        fields["rng"] = (draw.getrandbits(64), draw.getrandbits(64))
        fields["rng_device"] = draw.random() < 0.3
    fields["dlse"] = backward and draw.random() < 0.3


def random_case(seed, large=False):
    draw = random.Random(seed)
    dtype = draw.choice(["f16", "bf16"] if large else ["f32", "f16", "bf16"])
    dims = LARGE_DIMS if large else DIMS
    fields = dict(seed=seed, dtype=dtype, dtype_o=draw.choice([dtype, dtype, "f32"]))
    fields["heads_kv"] = draw.choice([1, 1, 2, 3])
    fields["heads_q"] = fields["heads_kv"] * draw.choice([1, 1, 2, 3, 5])
    fields["dim_qk"] = draw.choice(dims)
    fields["dim_v"] = draw.choice([fields["dim_qk"], fields["dim_qk"], draw.choice(dims)])
    layout(draw, fields, LARGE_LENGTHS if large else LENGTHS)
    backward = "page_size" not in fields and draw.random() < 0.7
    fields["backward"] = backward
    masks(draw, fields)
    scores(draw, fields, backward)
    fields["strides"] = draw.choice(["packed", "packed", "bshd", "bhsd", "sbhd", "qkv", "padded",
                                     "broadcast"])
    fields["threads"] = draw.choice([0, 0, 1, 2, 3])
    fields["splits"] = draw.choice([0, 0, 0, 1, 3, 17])
    fields["determinism"] = draw.choice([0, 1, 2])
    if "page_size" not in fields and draw.random() < 0.15:
        fields["starts_kv"] = starts(draw, Case(**fields))
    case = Case(**fields)
    if large and case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv > 1 << 21:
        case.dropout = 0.0  # NumPy's Philox would take longer than everything else
    if large and seed % 3 == 0:
        case = case.replace(dtype="f32", dtype_o="f32")
    return case


def for_tensor_cores(case):
    """The case with head dimensions that GPU kernels take: nothing is refused."""
    def dim(n):
        return (160, 192, 224, 256)[case.seed % 4] if n == 160 else -(-n // 8) * 8

    return case.replace(dim_qk=dim(case.dim_qk), dim_v=dim(case.dim_v))
