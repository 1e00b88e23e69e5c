"""Cases of a block mask: sizes of blocks beside those of kernels' tiles, what it hides, and the
forms in which it is given."""
from .case import DTYPES, Case


def block_masks():
    sizes = [(1, 1), (3, 5), (16, 16), (64, 64), (128, 32), (1000, 7), (65, 63)]
    for n, blocks in enumerate(sizes):
        yield Case(batch=2, seqlen_q=131, seqlen_kv=150, heads_q=2, dim_qk=16, blocks=blocks,
                   block_dims=("bh", "h", "b", "")[n % 4], causal=n % 2 == 1, backward=True,
                   strides=("packed", "padded")[n // 2 % 2], dtype=DTYPES[n % 3])
    yield Case(seqlen_q=130, seqlen_kv=130, dim_qk=16, blocks=(32, 32), density=0.0, backward=True)
    # Long stretches without a block, and blocks that tiles of a kernel cut.
    for sizes, dtype, more in (((64, 128), "bf16", {}), ((128, 64), "f16", dict(causal=True)),
                               ((16, 24), "bf16", dict(window=(2000, 10), dropout=0.2)),
                               ((256, 512), "bf16", dict(bias="u8", bias_empty=0.2, sink=True))):
        yield Case(seqlen_q=300, seqlen_kv=5000, heads_q=2, dim_qk=64, dtype=dtype, blocks=sizes,
                   density=0.04, **more)
    # Whole Q tiles that see nothing, and KV tiles of 128 keys.
    yield Case(seqlen_q=700, seqlen_kv=900, heads_q=2, dim_qk=64, dtype="bf16", blocks=(128, 128),
               density=0.12)
    yield Case(cu_q=[70, 3, 0], cu_kv=[90, 33, 8], heads_q=2, dim_qk=16, blocks=(16, 32),
               backward=True)
    # Tiles of a GPU's kernels that are whole but for the blocks, which they cut; large heads.
    for n, dim in enumerate((64, 128, 256)):
        whole = dict(seqlen_q=128, seqlen_kv=256, dtype=DTYPES[1 + n % 2], backward=True)
        yield Case(heads_q=2, dim_qk=dim, blocks=((48, 40), (32, 64), (16, 24))[n], **whole)
    large = Case(batch=2, seqlen_q=150, seqlen_kv=420, heads_q=2, dim_qk=256, dtype="bf16",
                 backward=True)
    yield large.replace(blocks=(64, 64), density=0.3, heads_q=4, heads_kv=2, determinism=1)
    yield large.replace(blocks=(128, 128), lens_q=[150, 64], lens_kv=[300, 65], causal=True)
    yield large.replace(blocks=(5, 300), density=0.7, window=(200, 9), sink=True, dsink=True)
    yield large.replace(blocks=(64, 128), density=0.3, cu_q=[130, 0, 64], cu_kv=[300, 40, 257],
                        amplitude=40.0, dtype="f16")
    yield large.replace(blocks=(64, 64), density=0.5, dim_qk=192, dim_v=128, dlse=True)
    # Backward: more than 512 Q tiles of all heads of a KV head, more than 32 in a row; keys of more
    # than 512 KV tiles, of which a Q tile sees few; heads or sequences that share their mask, or do
    # not as their lengths differ.
    many = Case(seqlen_q=2100, seqlen_kv=140, heads_q=16, heads_kv=1, dim_qk=64, dtype="bf16",
                density=0.1, backward=True)
    yield many.replace(blocks=(64, 128), determinism=1)
    yield many.replace(blocks=(128, 128), block_dims="", causal=True)
    yield Case(seqlen_q=70, seqlen_kv=66000, dim_qk=64, dtype="bf16", blocks=(64, 128),
               density=0.03, determinism=1, backward=True)
    whole = Case(batch=2, seqlen_q=300, seqlen_kv=420, heads_q=4, heads_kv=2, dim_qk=64,
                 dtype="bf16", blocks=(128, 128), backward=True)
    for dims in ("", "b", "h"):
        yield whole.replace(block_dims=dims, determinism=len(dims))
        yield whole.replace(block_dims=dims, lens_q=[300, 130], lens_kv=[257, 420], determinism=1)
    yield whole.replace(block_dims="h", blocks=(64, 64), cu_q=[300, 0, 77, 129],
                        cu_kv=[400, 33, 130, 0], dim_qk=128, determinism=1)
    # Blocks that hold whole tiles, of which some 32 in a row are hidden; scores far above the first
    # ones; K from pages.
    for n, (dim, sizes, more) in enumerate((
            (64, (64, 64), dict(amplitude=40.0)), (64, (128, 128), dict(page_size=16)),
            (128, (64, 64), dict(lens_q=[170], lens_kv=[4470])),
            (128, (128, 128), dict(causal=True)),
            (128, (256, 128), dict(amplitude=40.0)), (256, (128, 64), dict(amplitude=40.0)),
            (192, (64, 128), dict(dim_v=128, sink=True)))):
        yield Case(seqlen_q=200, seqlen_kv=4500, dim_qk=dim, dtype=DTYPES[1 + n % 2], blocks=sizes,
                   density=0.06, **more)


def block_lists():
    forms = ("padded", "ends", "rows", "")
    sizes = [(1, 1), (3, 5), (16, 16), (64, 64), (128, 32), (1000, 7), (65, 63)]
    for n, blocks in enumerate(sizes):
        yield Case(batch=2, seqlen_q=131, seqlen_kv=150, heads_q=2, dim_qk=16, blocks=blocks,
                   block_dims=("bh", "h", "b", "")[n % 4], causal=n % 2 == 1, backward=True,
                   strides=("packed", "padded")[n // 2 % 2], dtype=DTYPES[n % 3],
                   block_lists=forms[n % 3], block_lens=(None, "bh", "h", "", "b")[n % 5])
    small = Case(batch=2, seqlen_q=70, seqlen_kv=90, heads_q=4, heads_kv=2, dim_qk=32,
                 blocks=(16, 32), block_lists="ends", backward=True)
    yield small.replace(density=0.0)
    yield small.replace(density=1.0, block_lens="bh")
    yield small.replace(block_lists="", block_lens="h", lens_q=[70, 3], lens_kv=[41, 90])
    yield small.replace(block_lists="rows", starts_kv=[7, 60], window=(50, 20), block_lens="b")
    yield small.replace(dropout=0.3, sink=True, dsink=True, bias="f32", dbias="bhr", seed=2,
                        block_lens="bh")
    yield Case(cu_q=[70, 3, 0], cu_kv=[90, 33, 8], heads_q=2, dim_qk=16, blocks=(16, 32),
               block_lists="rows", block_lens="bh", backward=True)
    yield Case(batch=2, seqlen_q=1, seqlen_kv=700, heads_q=4, heads_kv=1, dim_qk=64, dtype="bf16",
               blocks=(1, 64), block_lists="padded", block_lens="bh", page_size=16)
    # Tiles of a GPU's kernels, whole and cut by blocks and by their ends; scores far above others.
    for n, (dim, blocks, more) in enumerate((
            (64, (64, 64), {}), (64, (128, 128), {}), (64, (48, 40), {}), (128, (64, 64), {}),
            (128, (128, 128), dict(causal=True)), (128, (128, 256), dict(density=1.0)),
            (256, (64, 64), {}), (256, (128, 128), dict(amplitude=40.0)),
            (192, (64, 128), dict(dim_v=128)))):
        yield Case(batch=2, seqlen_q=200, seqlen_kv=420, heads_q=4, heads_kv=2, dim_qk=dim,
                   dtype=DTYPES[1 + n % 2], backward=True, blocks=blocks, block_lists=forms[n % 4],
                   block_lens=("bh", "h", "")[n % 3], **more)
    yield Case(seqlen_q=200, seqlen_kv=4500, dim_qk=128, dtype="bf16", blocks=(128, 64),
               density=0.06, block_lists="ends", block_lens="bh")
    # More blocks than are made at once.
    yield Case(seqlen_q=70, seqlen_kv=9000, dim_qk=16, dtype="bf16", blocks=(64, 2), density=0.5,
               block_lists="padded", block_lens="")
