"""Cases of a dense bias: what it is broadcast over and its types, and rows whose alignment lets a
GPU's copy engine load its tiles."""
from .case import DTYPES, Case


def biases():
    dims = ["bhr", "hr", "br", "r", "bh", "h", "b", ""]
    common = dict(batch=2, seqlen_q=37, seqlen_kv=70, heads_q=2, dim_qk=16, backward=True)
    for n, kept in enumerate(dims):
        yield Case(bias=DTYPES[n % 3], bias_dims=kept, dbias=kept, dtype=DTYPES[n // 3],
                   strides=("packed", "padded")[n % 2], **common)
        yield Case(bias="f32", bias_dims=kept, dbias=dims[-n], causal=n % 2 == 0, **common)
        yield Case(bias="u8", bias_dims=kept, bias_empty=0.2, dtype=DTYPES[n % 3], **common)
    yield Case(bias="f32", bias_empty=0.3, dbias="bhr", **common)
    yield Case(bias="f16", bias_empty=1.0, dbias="hr", dtype="f16", **common)
    yield Case(bias="u8", bias_empty=1.0, sink=True, dsink=True, **common)
    for dims_kept in ("bhr", "hr", "r", ""):
        yield Case(cu_q=[5, 40, 0, 70], cu_kv=[9, 33, 5, 64], heads_q=2, dim_qk=16, backward=True,
                   bias="bf16", dtype="bf16", bias_dims=dims_kept, dbias=dims_kept)
    for dims_kept in ("bhr", "bh", "r", "h"):  # sums past all lengths, and of nothing
        short = dict(common, bias="f32", dbias=dims_kept)
        yield Case(lens_q=[30, 0], lens_kv=[50, 64], **short)
        yield Case(lens_q=[9], lens_kv=[40], **dict(short, batch=1))
        yield Case(**dict(short, seqlen_q=0))


def bias_tiles():
    """Rows of the bias that begin at multiples of 16 bytes."""
    base = Case(batch=2, seqlen_q=150, seqlen_kv=272, heads_q=2, dim_qk=64, dtype="bf16",
                bias="bf16", backward=True)
    for n, (dim, dtype) in enumerate([(64, "bf16"), (32, "f16"), (128, "bf16"), (128, "f16"),
                                      (256, "bf16")]):
        for bias in (dtype, "f32", "u8"):
            kept = ("bhr", "hr", "br", "h", "r")[n] if bias != "f32" else "bhr"
            yield base.replace(dim_qk=dim, dim_v=dim, dtype=dtype, bias=bias, bias_dims=kept,
                               dbias=None if bias == "u8" else kept, causal=n % 2 == 1,
                               bias_empty=0.1 * (n % 3))
    yield base.replace(heads_q=6, heads_kv=2, bias_dims="hr", causal=True, window=(70, 20))
    yield base.replace(heads_q=4, heads_kv=2, dim_qk=128, bias="f32", bias_dims="r", window=(50, 3))
    yield base.replace(dim_qk=128, bias="u8", chunk=64, sink=True, dsink=True, scale=-0.2)
    yield base.replace(dim_qk=40, dim_v=64, scale=-0.3, top_left=True, causal=True, dtype_o="f32")
    yield base.replace(lens_q=[150, 66], lens_kv=[200, 272], bias="u8", bias_empty=0.3)
    yield base.replace(dim_qk=128, lens_kv=[65, 0], lens_q=[150, 9], dbias="bhr", dlse=True)
    yield base.replace(cu_q=[70, 5, 0, 130], cu_kv=[80, 160, 16, 144], bias="f32", bias_dims="hr",
                       dbias="hr", causal=True)
    yield base.replace(page_size=16, bias="u8", bias_dims="b", backward=False)
    yield base.replace(batch=5, seqlen_q=300, seqlen_kv=320, heads_q=4, bias_dims="hr", dbias="hr")
    yield base.replace(batch=5, seqlen_q=300, seqlen_kv=320, heads_q=4, bias="f32", dim_qk=128,
                       bias_dims="hr", dbias="hr", determinism=1)
    yield base.replace(seqlen_kv=270, bias="f32", dbias="hr")  # rows that do not
    # Sums in order: of more sequences than a GPU's tiles, so that CTAs share a tile; over heads; of
    # lengths, which end before the bias does.
    once = base.replace(bias_dims="hr", dbias="hr", determinism=1)
    yield once.replace(batch=30, seqlen_q=40, seqlen_kv=100, bias="f32", bias_empty=0.2)
    yield once.replace(batch=9, heads_q=3, seqlen_q=70, seqlen_kv=140, bias_dims="r", dbias="r",
                       causal=True, dtype="f16", bias="f16")
    yield once.replace(batch=6, heads_q=1, seqlen_kv=270, lens_q=[70, 3, 0, 150, 64, 1],
                       lens_kv=[140, 7, 128, 0, 270, 1], bias="f32", dlse=True)
    yield once.replace(cu_q=[70, 5, 0, 130, 64], cu_kv=[80, 160, 16, 144, 3], dim_qk=128,
                       dim_v=96, causal=True)
    yield once.replace(batch=5, seqlen_q=70, seqlen_kv=131, dim_qk=256, dim_v=192, bias="f32")
    yield once.replace(batch=3, heads_q=4, heads_kv=2, dim_qk=32, dim_v=32, window=(40, 9),
                       amplitude=30.0, dtype_o="f32")
