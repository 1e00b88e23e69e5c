"""The listed cases, by theme: odd on purpose, since kernels fail at the edges of tiles."""
from .bias_cases import biases, bias_tiles
from .block_cases import block_lists, block_masks
from .case import DTYPES, Case

EDGES = (63, 64, 65)          # around the tile edges of the kernels


def shapes():
    pairs = [(1, 1), (1, 3), (3, 1), (1, 257), (257, 1), (3, 113), (113, 3), (113, 203),
             (203, 113), (64, 64), (63, 65), (128, 129), (257, 257), (799, 3), (3, 799),
             (0, 5), (5, 0), (0, 0)]
    for n, (rows, keys) in enumerate(pairs):
        for causal in (False, True):
            yield Case(batch=2, seqlen_q=rows, seqlen_kv=keys, heads_q=2, dim_qk=32, causal=causal,
                       dtype=DTYPES[n % 3], backward=True)
    for n, (rows, keys) in enumerate([(1023, 799), (257, 1023), (799, 1023)]):
        yield Case(seqlen_q=rows, seqlen_kv=keys, heads_q=1, dim_qk=64, causal=n != 1,
                   dtype=DTYPES[n], backward=True)
    yield Case(batch=0, backward=True)
    yield Case(batch=0, cu_q=[], cu_kv=[], backward=True)


def groups():
    for n, (heads, kv) in enumerate([(2, 2), (2, 1), (3, 1), (10, 2), (7, 1), (16, 2), (6, 3)]):
        yield Case(batch=2, seqlen_q=19, seqlen_kv=37, heads_q=heads, heads_kv=kv, dim_qk=16,
                   causal=True, dtype=DTYPES[n % 3], backward=True, sink=n % 2 == 0,
                   dsink=n % 2 == 0)
        yield Case(batch=3, seqlen_q=1, seqlen_kv=113, heads_q=heads, heads_kv=kv, dim_qk=64,
                   dtype=DTYPES[(n + 1) % 3])
    yield from caches()
    # More sequences than a GPU works on at once.
    for n, pages in enumerate((0, 4)):
        yield Case(batch=700, seqlen_q=n + 1, seqlen_kv=67, heads_q=4, heads_kv=1, dim_qk=128,
                   lens_kv=[37 * b % 68 for b in range(700)], dtype=DTYPES[2 - n], causal=n == 1,
                   page_size=pages)


def caches():
    """Long enough that one task takes several KV heads, odd in number."""
    for n, (heads, kv, rows) in enumerate([(14, 7, 1), (12, 3, 5), (5, 5, 2), (10, 5, 6)]):
        yield Case(batch=4, seqlen_q=rows, seqlen_kv=1100, lens_kv=[1100, 1, 700, 1031],
                   heads_q=heads, heads_kv=kv, dim_qk=(128, 72, 33, 64)[n],
                   dim_v=(128, 40, 64, 96)[n], dtype=DTYPES[(n + 2) % 3], causal=n % 2 == 1,
                   window=(600, 3) if n == 3 else None, page_size=16 if n == 0 else 0,
                   strides=("packed", "padded")[n == 2], threads=1, sink=n == 1,
                   dropout=0.2 if n == 2 else 0)


def few_rows():
    """Up to 16 rows of a group, on caches of every kind: a GPU's block has them all, and its warps
    share the keys."""
    base = Case(batch=2, seqlen_q=1, seqlen_kv=513, heads_q=8, heads_kv=2, dim_qk=128, dtype="bf16")
    yield base.replace(sink=True, lens_kv=[513, 0])
    yield base.replace(splits=3, sink=True, lens_kv=[513, 130], dtype="f16")
    yield base.replace(seqlen_q=4, causal=True, window=(70, 0), dim_qk=64)
    yield base.replace(seqlen_q=3, chunk=100, splits=2, dim_qk=40, dim_v=64, dtype="f16")
    yield base.replace(seqlen_q=2, causal=True, top_left=True, dim_qk=96, dim_v=128)
    yield base.replace(seqlen_q=16, heads_q=2, causal=True, strides="bhsd", lens_q=[16, 7],
                       lens_kv=[200, 513])
    yield base.replace(cu_q=[1, 4], cu_kv=[513, 77], causal=True, dtype_o="f32")
    for n, page_size in enumerate((1, 3, 16, 64, 256)):
        yield base.replace(page_size=page_size, seqlen_q=1 + n % 3, causal=True, splits=n % 3,
                           lens_kv=[513, 257 - n], dim_qk=(64, 128)[n % 2], dtype=DTYPES[1 + n % 2])
    # As many blocks as a large GPU has multiprocessors and more, and more than it works on at once.
    for n, batch in enumerate((100, 170, 300, 500)):
        yield base.replace(batch=batch, seqlen_q=1 + n % 2, seqlen_kv=150, heads_q=4, heads_kv=1,
                           lens_kv=[37 * b % 151 for b in range(batch)], dtype=DTYPES[1 + n % 2],
                           dim_qk=(128, 64)[n // 2 % 2], causal=n == 1, page_size=(0, 16)[n % 2])
        yield base.replace(batch=batch, seqlen_kv=90, heads_q=2, heads_kv=1, sink=True,
                           dim_qk=(64, 128)[n // 2 % 2])
    for n, keys in enumerate((1, 15, 17, 63, 64, 65, 127, 129, 255, 257)):
        yield base.replace(batch=1, seqlen_kv=keys, heads_q=(1, 16)[n % 2], heads_kv=1,
                           dim_qk=(64, 128)[n % 3 == 0], dtype=DTYPES[1 + n % 2])


def dims():
    same = (1, 2, 3, 5, 8, 13, 16, 17, 24, 31, 32, 33, 40, 48, 59, 64, 65, 72, 80, 96, 111, 128,
            160, 192, 224, 256, 257, 511, 512)
    for n, dim in enumerate(same):
        yield Case(seqlen_q=33, seqlen_kv=70, heads_q=2, heads_kv=1, dim_qk=dim,
                   dtype=DTYPES[n % 3], backward=True)
    pairs = [(1, 512), (512, 1), (8, 3), (3, 8), (64, 96), (96, 64), (128, 59), (192, 128),
             (128, 192), (72, 256), (576 - 64, 64), (40, 41), (100, 200)]
    for n, (dim, dim_v) in enumerate(pairs):
        yield Case(batch=2, seqlen_q=17, seqlen_kv=67, heads_q=2, heads_kv=1, dim_qk=dim,
                   dim_v=dim_v, dtype=DTYPES[n % 3], causal=True, backward=True)
    # Forward only: GPUs with little shared memory take these.
    for dim, dtype in ((256, "bf16"), (200, "f16")):
        yield Case(seqlen_q=130, seqlen_kv=150, heads_q=2, dim_qk=dim, dtype=dtype, causal=True)


def windows():
    sides = [(0, 0), (0, -1), (-1, 0), (5, -1), (-1, 5), (-1, -1), (3, 2), (1000, 1000)]
    sides += [(n, n) for n in EDGES] + [(n, 0) for n in EDGES] + [(0, n) for n in EDGES]
    sizes = [(150, 150), (70, 203), (203, 70)]
    for n, window in enumerate(sides):
        for m, (rows, keys) in enumerate(sizes):
            yield Case(seqlen_q=rows, seqlen_kv=keys, heads_q=1, dim_qk=16, window=window,
                       causal=(n + m) % 4 == 3, top_left=(n + m) % 2 == 1, backward=True,
                       dtype=DTYPES[(n + m) % 3])
    # First and last tiles of 128 keys, of which a strip of 64 rows sees all or a half.
    for n, window in enumerate([(128, 63), (191, 40), (191, 0), (200, 127), (130, 64)]):
        yield Case(seqlen_q=384, seqlen_kv=384, heads_q=2, heads_kv=1, dim_qk=64, window=window,
                   dtype=DTYPES[1 + n % 2], backward=True)


def chunks():
    for n, chunk in enumerate([1, 7, 16, 63, 64, 65, 500]):
        for m, (rows, keys) in enumerate([(130, 130), (70, 201), (201, 70)]):
            yield Case(seqlen_q=rows, seqlen_kv=keys, heads_q=2, heads_kv=1, dim_qk=16,
                       chunk=chunk, causal=m != 1, top_left=(n + m) % 3 == 0,
                       window=(9, 9) if n % 3 == 1 else None, backward=True)


def trees():
    """Drafted tokens: trees that cross tiles and pages, of more keys than there are, of one query
    and of the most; queries that are no part of the tree."""
    base = Case(batch=2, seqlen_q=64, seqlen_kv=700, heads_q=4, heads_kv=2, dim_qk=64, dtype="bf16",
                tree=64)
    sizes = [(1, 1), (1, 64), (2, 5), (5, 33), (16, 31), (33, 32), (64, 65), (100, 100), (256, 256),
             (256, 255), (300, 256), (7, 256)]
    for n, (rows, tree) in enumerate(sizes):
        for m, dtype in enumerate(DTYPES):
            yield base.replace(seqlen_q=rows, tree=tree, dtype=dtype, causal=(n + m) % 2 == 0,
                               density=(0.5, 0.05, 0.9)[(n + m) % 3], sink=n % 4 == 1,
                               dim_qk=(64, 128, 40)[n % 3])
            # Fewer keys than drafted tokens, and none; tiles of 64 keys end within the tree.
            yield base.replace(seqlen_q=rows, tree=tree, dtype=dtype, seqlen_kv=tree + 100,
                               batch=4, lens_kv=[tree + 100, tree // 2, 0, tree],
                               window=(50, 0) if m == 1 else None, dtype_o="f32")
    masks = [dict(window=(100, 0)), dict(window=(3, 5)), dict(window=(0, -1)), dict(chunk=50),
             dict(chunk=200, causal=True, window=(30, 2)), dict(causal=True, top_left=True),
             dict(chunk=33, top_left=True), dict(window=(20, 20), top_left=True),
             dict(blocks=(16, 16)), dict(blocks=(5, 7), causal=True, block_dims="b"),
             dict(bias="u8"), dict(bias="f16", alibi="bh"), dict(softcap=5.0), dict(scale=-0.3),
             dict(dropout=0.3), dict(determinism=2), dict(splits=3, sink=True), dict(splits=17)]
    for n, more in enumerate(masks):
        for rows, tree in ((6, 40), (64, 64), (150, 70)):
            yield base.replace(seqlen_q=rows, tree=tree, dtype=DTYPES[n % 3], **more)
    for n, size in enumerate((1, 3, 16, 64, 256)):
        yield base.replace(page_size=size, seqlen_q=40, tree=45, lens_kv=[700, 333], causal=True,
                           dtype=DTYPES[n % 3], strides=("packed", "padded")[n % 2])
        yield base.replace(page_size=size, seqlen_q=3, heads_kv=4, tree=17, lens_kv=[10, 513],
                           window=(300, 0), dtype=DTYPES[(n + 1) % 3], splits=n % 3)
    for n, dims_kept in enumerate(("br", "b", "r", "")):
        yield base.replace(cu_q=[64, 0, 33, 1], cu_kv=[64, 70, 300, 513], tree_dims=dims_kept,
                           dtype=DTYPES[n % 3], causal=n % 2 == 0)
        yield base.replace(lens_q=[64, 20], starts_kv=[3, 200], tree_dims=dims_kept,
                           strides="padded", dtype=DTYPES[(n + 2) % 3], window=(400, 0))
        yield base.replace(density=0.0, tree_dims=dims_kept, seqlen_q=9)
    # One key is left, whose value is o.
    yield base.replace(seqlen_q=1, seqlen_kv=1, tree=1, density=1.0, dtype_o="f32")
    yield base.replace(seqlen_q=30, seqlen_kv=30, tree=30, density=0.04, dtype_o="f32")


def lengths():
    cu = [[1], [3, 0, 113, 1, 17], [0, 5, 0], [0, 0], [33, 64, 65, 1]]
    kv = [[7], [5, 4, 203, 0, 17], [3, 0, 2], [2, 0], [100, 64, 33, 70]]
    for n, (rows, keys) in enumerate(zip(cu, kv)):
        common = dict(heads_q=2, heads_kv=1, dim_qk=24, backward=True)
        yield Case(cu_q=rows, cu_kv=keys, causal=True, dtype=DTYPES[n % 3], **common)
        yield Case(cu_q=rows, cu_kv=rows, strides="qkv", causal=n % 2 == 0, **common)
        yield Case(cu_q=rows, seqlen_kv=40, window=(8, 0), **common)
        yield Case(cu_kv=keys, seqlen_q=21, strides="bhsd", **common)
        used_q, used_kv = [x // 2 for x in rows], [(x * 2 + 2) // 3 for x in keys]
        yield Case(cu_q=rows, cu_kv=keys, lens_q=used_q, lens_kv=used_kv, causal=True, **common)
        yield Case(batch=len(rows), seqlen_q=113, seqlen_kv=203, lens_q=rows, lens_kv=keys,
                   causal=n % 2 == 1, strides=("packed", "sbhd")[n % 2], dtype=DTYPES[n % 3],
                   **common)
        yield Case(batch=len(rows), seqlen_q=13, seqlen_kv=203, lens_kv=keys, **common)


def starts():
    """Left padding: NaN before a sequence's first key, where nothing is written either."""
    common = dict(batch=3, seqlen_q=70, seqlen_kv=203, starts_kv=[3, 0, 130], heads_q=4, heads_kv=2,
                  dim_qk=64, backward=True)
    rich = dict(alibi="bh", bias="f32", bias_dims="hr", dbias="hr", dropout=0.2, sink=True,
                dsink=True, dlse=True, blocks=(16, 32), density=0.8)
    masks = [dict(), dict(causal=True), dict(window=(40, 3)), dict(causal=True, chunk=33),
             dict(causal=True, top_left=True), dict(alibi="h", causal=True), dict(alibi="bh"),
             dict(bias="f32", bias_dims="hr", dbias="hr"),
             dict(bias="u8", bias_dims="br", bias_empty=0.2), dict(dropout=0.3),
             dict(softcap=9.0, window=(90, 0)), dict(blocks=(32, 64)),
             dict(rich, causal=True, window=(100, 0))]
    for n, features in enumerate(masks):
        for m, dtype in enumerate(DTYPES):
            changes = dict(features, lens_kv=[203, 64, 150]) if (n + m) % 2 else features
            strides = ("packed", "bhsd", "padded", "qkv", "broadcast")[(n + m) % 5]
            yield Case(dtype=dtype, strides=strides, determinism=(n + m) % 3, **common, **changes)
            yield Case(cu_q=[65, 0, 130, 1], cu_kv=[257, 40, 131, 64], starts_kv=[65, 40, 2, 63],
                       heads_q=2, dim_qk=40, dtype=dtype, backward=True, **features)
    # Whole tiles of padding, none at all, and nothing else.
    for n, first in enumerate((0, 1, 63, 64, 65, 128, 200, 513)):
        many = dict(batch=2, seqlen_kv=513, starts_kv=[first, first // 2], heads_q=8, heads_kv=2,
                    dim_qk=(64, 128)[n % 2], dtype=DTYPES[1 + n % 2], causal=n % 3 == 0)
        yield Case(seqlen_q=1, splits=(0, 3)[n % 2], sink=n == 7, **many)
        yield Case(seqlen_q=5, lens_kv=[513, max(first // 2, 300)], **many)
        yield Case(seqlen_q=140, dropout=0.1 * (n % 2), backward=True, **many)
    # Many queries, and many keys: kernels of their own.
    many = dict(batch=2, dim_qk=128, dtype="bf16", starts_kv=[77, 130], backward=True)
    yield Case(seqlen_q=170, seqlen_kv=200, heads_q=64, heads_kv=1, **many)
    yield Case(seqlen_q=400, seqlen_kv=900, heads_q=2, causal=True, **many)
    yield Case(seqlen_q=300, seqlen_kv=700, heads_q=2, alibi="h", **many)


def pages():
    for n, size in enumerate([1, 3, 16, 64, 256]):
        sizes = [(1, 203, [203, 1, 0, 64]), (5, 300, [300, 257, 5, 63]),
                 (70, 113, [113, 64, 65, 70])]
        for m, (rows, keys, kv) in enumerate(sizes):
            yield Case(batch=4, seqlen_q=rows, seqlen_kv=keys, lens_kv=kv, page_size=size,
                       heads_q=4, heads_kv=2, dim_qk=32, causal=True, dtype=DTYPES[(n + m) % 3],
                       strides=("packed", "bhsd", "padded")[m], splits=(0, 3, 1)[m])
        yield Case(cu_q=[3, 1, 0, 20], seqlen_kv=130, lens_kv=[130, 7, 64, 100], page_size=size,
                   heads_q=2, heads_kv=1, dim_qk=40, window=(50, 0))
        yield Case(batch=2, seqlen_q=2, seqlen_kv=97, page_size=size, dim_qk=8, sink=True)
    base = Case(batch=3, seqlen_q=1, seqlen_kv=203, lens_kv=[203, 0, 65], heads_q=4, heads_kv=2,
                dim_qk=64, page_size=1, hidden=0.5)
    for n, dtype in enumerate(DTYPES):
        yield base.replace(dtype=dtype, splits=n, sink=n == 1, dtype_o="f32")
        yield base.replace(dtype=dtype, seqlen_q=40, causal=True, page_size=16,
                           hidden=(0.3, 0.9, 1.0)[n])
        yield base.replace(dtype=dtype, seqlen_q=5, tree=20, page_size=3, window=(100, 0))
        yield base.replace(dtype=dtype, seqlen_q=33, blocks=(16, 16), softcap=5.0, hidden=0.8,
                           page_size=(1, 16, 64)[n], dropout=0.1)


def splits():
    for n, parts in enumerate([1, 3, 17]):
        for m, (rows, keys) in enumerate([(1, 1023), (3, 257), (17, 799), (1, 5)]):
            yield Case(batch=2, seqlen_q=rows, seqlen_kv=keys, heads_q=4, heads_kv=2, dim_qk=64,
                       splits=parts, causal=True, sink=m == 1, dtype=DTYPES[(n + m) % 3],
                       window=(100, 0) if m == 2 else None, dropout=0.2 if m == 1 else 0.0)
        yield Case(batch=3, seqlen_q=2, seqlen_kv=300, lens_kv=[300, 0, 65], heads_q=2, dim_qk=32,
                   splits=parts, dtype_o="f32", dtype="bf16")


def strides():
    for n, mode in enumerate(["packed", "bshd", "bhsd", "sbhd", "qkv", "padded", "broadcast"]):
        for heads, kv in [(2, 2), (4, 2)]:
            for dim, dim_v in [(16, 16), (9, 5)]:
                yield Case(batch=3, seqlen_q=37, seqlen_kv=37, heads_q=heads, heads_kv=kv,
                           dim_qk=dim, dim_v=dim_v, strides=mode, backward=True,
                           dtype=DTYPES[n % 3], causal=kv == 2)


def alibis():
    common = dict(batch=2, seqlen_q=37, seqlen_kv=70, heads_q=2, dim_qk=16, backward=True)
    for alibi in ("h", "bh"):
        for causal in (False, True):
            yield Case(alibi=alibi, causal=causal, top_left=causal, **common)
            yield Case(alibi=alibi, bias="f32", dbias="bhr", causal=causal, softcap=5.0, **common)
    for dim in (64, 128):  # tiles of keys on both sides of queries, and around them
        yield Case(dtype="bf16", alibi="h", seqlen_q=900, seqlen_kv=900, heads_q=2, dim_qk=dim)
        for dtype in ("bf16", "f16"):  # many tiles before all queries; queries without keys
            longer = dict(dtype=dtype, alibi="bh", batch=2, heads_q=4, dim_qk=dim, causal=True)
            yield Case(seqlen_q=300, seqlen_kv=700, lens_kv=[700, 150], steepest=1.0, **longer)
            yield Case(seqlen_q=400, seqlen_kv=250, sink=True, **longer)
            yield Case(seqlen_q=400, seqlen_kv=250, sink=True, softcap=15.0, **longer)
        yield Case(dtype="bf16", alibi="h", steepest=4.0, seqlen_q=400, seqlen_kv=700, heads_q=8,
                   window=(300, 200), dim_qk=dim)


def features():
    common = dict(batch=2, seqlen_q=45, seqlen_kv=67, heads_q=4, heads_kv=2, dim_qk=32,
                  backward=True)
    for dtype in DTYPES:
        yield Case(dtype=dtype, softcap=20.0, causal=True, **common)
        yield Case(dtype=dtype, softcap=1.0, window=(10, 3), **common)
        for dim in (32, 192):  # scores far below the softcap
            yield Case(dtype=dtype, softcap=20.0, amplitude=0.5, **dict(common, dim_qk=dim))
        for amplitude in (0.2, 0.6, 1.0, 1.5):  # from far below it to above, in many tiles of keys
            yield Case(dtype=dtype, softcap=20.0, amplitude=amplitude, seqlen_q=70, seqlen_kv=700,
                       dim_qk=64)
        yield Case(dtype=dtype, sink=True, dsink=True, dlse=True, causal=True, top_left=True,
                   **common)
        yield Case(dtype=dtype, dlse=True, **common)
        yield Case(dtype=dtype, dropout=0.3, **common)
        yield Case(dtype=dtype, dropout=0.85, causal=True, rng_device=True, sink=True, dsink=True,
                   dlse=True, **common)
        yield Case(dtype=dtype, dtype_o="f32", causal=True, **common)
        yield Case(dtype=dtype, scale=0.5, amplitude=2.0, **common)
        yield Case(dtype=dtype, scale=-0.3, causal=True, **common)
        yield Case(dtype=dtype, scale=1e-20, **common)
        yield Case(dtype=dtype, softcap=10.0, alibi="bh", bias=dtype, dbias="hr", sink=True,
                   dsink=True, dropout=0.1, dlse=True, causal=True, window=(40, 0),
                   blocks=(16, 16), density=0.8, **common)
        yield Case(dtype=dtype, lse=False, seqlen_q=9, seqlen_kv=9)
    yield Case(cu_q=[33, 1, 70], cu_kv=[40, 9, 60], heads_q=2, dim_qk=16, dropout=0.25,
               backward=True, causal=True)
    # A row with no key whose lse is the sink alone.
    yield Case(seqlen_q=40, seqlen_kv=10, heads_q=2, dim_qk=8, causal=True, sink=True, dsink=True,
               dlse=True, backward=True)


def gradients():
    """The backward pass where several tiles of queries and keys meet, for each size of head that
    GPU kernels are made for."""
    rich = dict(softcap=15.0, alibi="h", bias="f32", bias_dims="hr", dbias="h", dropout=0.2,
                sink=True, dsink=True, dlse=True, blocks=(32, 64), density=0.6, window=(150, 20))
    dims_of_heads = [(64, 64), (96, 128), (128, 40), (192, 128), (200, 256), (256, 256)]
    for n, (dim, dim_v) in enumerate(dims_of_heads):
        common = dict(dim_qk=dim, dim_v=dim_v, backward=True)
        for m, dtype in enumerate(DTYPES[1:]):
            yield Case(batch=2, seqlen_q=200, seqlen_kv=333, dtype=dtype, determinism=(n + m) % 3,
                       **common)
            yield Case(seqlen_q=333, seqlen_kv=200, heads_q=3, heads_kv=1, causal=True,
                       dtype=dtype, determinism=(n + m + 1) % 3, **common)
            yield Case(cu_q=[130, 0, 257, 64], cu_kv=[300, 40, 257, 1], heads_q=4, heads_kv=2,
                       causal=True, dtype=dtype, dtype_o="f32", determinism=(n + m + 2) % 3,
                       **common)
            yield Case(seqlen_q=190, seqlen_kv=270, heads_q=2, heads_kv=1, dtype=dtype,
                       determinism=(n + m) % 3, **rich, **common)
            # Few blocks, and tiles of queries that see nothing; a bias without its gradient, with
            # which GPUs have other kernels.
            yield Case(batch=2, seqlen_q=300, seqlen_kv=420, heads_q=4, heads_kv=2, dtype=dtype,
                       causal=m == 1, blocks=((48, 40), (16, 128))[m], density=(0.05, 0.2)[m],
                       determinism=(n + m + 1) % 2, **common)
            # Memory behind the keys in use, which end in the first and in the second half of a
            # tile, and in tiles of queries that other tiles of keys have passed by.
            yield Case(batch=4, seqlen_q=150, seqlen_kv=400, lens_q=[150, 20, 129, 64],
                       lens_kv=[390, 64, 300, 129], heads_q=2, heads_kv=1, window=(90, 30),
                       dtype=dtype, determinism=(n + m + 1) % 2, **common)
            yield Case(batch=2, seqlen_q=280, seqlen_kv=500, lens_kv=[500, 193], chunk=150,
                       causal=m == 0, dtype=dtype, determinism=(n + m) % 2, **common)
            # Keys that nobody sees, behind a tile of queries that is not full.
            yield Case(seqlen_q=70, seqlen_kv=420, heads_q=2, dtype=dtype, causal=True,
                       top_left=True, determinism=1, **common)
            yield Case(cu_q=[130, 0, 190], cu_kv=[270, 40, 190], heads_q=2, heads_kv=1, dtype=dtype,
                       determinism=(n + m) % 2, **{**rich, "dbias": None}, **common)


def dropouts():
    """A dropout and little else, for which Hopper has kernels, of each size of head: several tiles
    of both kinds, not all full, heads of a group."""
    dims_of_heads = [(64, 64), (40, 64), (128, 128), (192, 128), (192, 192), (256, 200)]
    for n, (dim, dim_v) in enumerate(dims_of_heads):
        for m, dtype in enumerate(DTYPES[1:]):
            common = dict(dim_qk=dim, dim_v=dim_v, dtype=dtype, backward=True)
            yield Case(batch=2, seqlen_q=200, seqlen_kv=333, heads_q=4, heads_kv=2, causal=m == 0,
                       dropout=(0.1, 0.5, 0.9)[n % 3], determinism=(n + m) % 2, **common)
            yield Case(cu_q=[130, 0, 190], cu_kv=[270, 40, 190], heads_q=4, heads_kv=1, causal=True,
                       dropout=(0.5, 0.75, 0.2)[n % 3], rng_device=True, sink=True, dsink=True,
                       dlse=True, determinism=(n + m + 1) % 2, **common)
            yield Case(batch=2, seqlen_q=150, seqlen_kv=300, lens_q=[150, 70], lens_kv=[290, 64],
                       heads_q=2, window=(90, 30), dropout=0.99999 if n == 0 else 0.3, **common)


def many_queries():
    """Keys that thousands of queries see, of many heads and all: the Hopper kernel for many."""
    one = dict(heads_q=64, heads_kv=1, dim_qk=128, backward=True)
    yield Case(seqlen_q=130, seqlen_kv=200, dtype="bf16", **one)
    yield Case(seqlen_q=161, seqlen_kv=161, dtype="f16", sink=True, dsink=True, dlse=True,
               determinism=1, **one)
    yield Case(seqlen_q=170, seqlen_kv=129, dtype="bf16", dtype_o="f32", strides="padded", **one)
    yield Case(cu_q=[130, 3, 260], cu_kv=[131, 64, 5], dtype="f16", determinism=1, **one)
    few = dict(one, dim_qk=96, dim_v=128, heads_q=100, heads_kv=2)
    yield Case(batch=2, seqlen_q=170, seqlen_kv=140, lens_q=[81, 170], lens_kv=[129, 37],
               dtype="bf16", **few)
    yield Case(batch=2, seqlen_q=200, seqlen_kv=300, lens_kv=[300, 193], dtype="f16",
               determinism=1, **dict(few, dim_v=72))


def many_heads():
    """More than the emulator works on at once: the Hopper kernel starts before all are prepared."""
    common = dict(seqlen_kv=100, heads_q=50, backward=True)
    yield Case(batch=4, seqlen_q=300, dim_qk=64, lens_q=[300, 129, 0, 257], dlse=True,
               dtype="bf16", **common)
    yield Case(batch=4, seqlen_q=130, dim_qk=128, dtype="f16", determinism=1, sink=True,
               dsink=True, **common)
    yield Case(batch=8, seqlen_q=131, dim_qk=96, dim_v=40, dtype="bf16", softcap=5.0,
               strides="padded", **dict(common, heads_kv=25))


def many_keys():
    """Enough tiles of keys to occupy many threads, for which the CPU's are larger, beside sequences
    that make few."""
    common = dict(heads_q=16, backward=True)
    yield Case(seqlen_q=103, seqlen_kv=799, dim_qk=64, dtype="bf16", causal=True, **common)
    yield Case(batch=2, seqlen_q=130, seqlen_kv=520, dim_qk=128, lens_kv=[513, 190], dtype="f32",
               window=(100, 40), dropout=0.2, **common)
    yield Case(cu_q=[97, 30, 120], cu_kv=[400, 3, 129], dim_qk=192, dim_v=256, dtype="bf16",
               softcap=9.0, causal=True, **common)
    yield Case(batch=2, seqlen_q=60, seqlen_kv=500, lens_kv=[500, 77], dim_qk=40, dtype="f16",
               bias="f32", bias_dims="r", dbias="r", **dict(common, heads_q=32, heads_kv=16))
    # A second tile of the forward pass, where the dropout's 16 keys begin anew.
    yield Case(seqlen_q=30, seqlen_kv=620, dim_qk=100, dtype="f32", dropout=0.3,
               **dict(common, heads_q=2))
    # Few that are more than many.
    yield Case(batch=2, seqlen_q=40, seqlen_kv=2049, lens_kv=[1790, 2049], dim_qk=96, dtype="f32",
               **dict(common, heads_q=4))
    yield Case(seqlen_q=98, seqlen_kv=300, dim_qk=511, dim_v=90, dtype="bf16", alibi="h",
               blocks=(48, 40), density=0.4, **common)


def latent():
    """Latent attention: V is the first part of K's rows, of one head. And the largest heads."""
    base = Case(batch=2, seqlen_q=1, seqlen_kv=150, heads_q=5, heads_kv=1, dim_qk=576, dim_v=512,
                dtype="bf16", v_in_k=True)
    for n, dtype in enumerate(DTYPES):
        more = dict(dtype=dtype, dtype_o="f32" if n == 2 else dtype)
        yield base.replace(lens_kv=[150, 65], sink=n == 2, heads_q=3 + 9 * n, **more)
        yield base.replace(seqlen_q=3, causal=True, page_size=(1, 64, 1)[n], lens_kv=[77, 150],
                           splits=(0, 2, 3)[n], **more)
    yield base.replace(page_size=64, seqlen_q=2, tree=2, strides="padded", dtype="f16")
    yield base.replace(seqlen_q=7, tree=9, lens_kv=[150, 8], heads_q=10, sink=True)
    yield base.replace(batch=1, heads_q=70, seqlen_kv=70)
    yield base.replace(cu_q=[37, 0, 70], cu_kv=[40, 3, 96], heads_q=2, causal=True)
    yield base.replace(determinism=2, causal=True, dtype="f16")
    sizes = [(576, 512, "f16"), (264, 512, "bf16"), (512, 40, "f16"), (520, 264, "f32")]
    for n, (dim, dim_v, dtype) in enumerate(sizes):
        yield Case(seqlen_q=40, seqlen_kv=90, heads_q=(2, 1)[n // 3], heads_kv=1, dim_qk=dim,
                   dim_v=dim_v, dtype=dtype, causal=n % 2 == 0, alibi="h" if n == 0 else "",
                   softcap=10.0 if n == 1 else 0.0, dropout=0.2 if n == 3 else 0.0)
    for n, (dim, dim_v) in enumerate(((512, 512), (320, 264), (1024, 1024), (576, 512))):
        yield Case(seqlen_q=70, seqlen_kv=75, heads_q=2, heads_kv=1, dim_qk=dim, dim_v=dim_v,
                   dtype=DTYPES[1 + n % 2], causal=n % 2 == 0, backward=True, v_in_k=n == 3,
                   determinism=n % 2, **(dict(bias="f32", dbias="hr") if n == 1 else {}))
    yield Case(seqlen_q=30, seqlen_kv=140, heads_q=1, dim_qk=520, dim_v=777, backward=True)


LISTED = {f.__name__: list(f()) for f in (
    shapes, groups, few_rows, dims, windows, chunks, block_masks, block_lists, trees, lengths,
    starts, pages, splits, strides, biases, bias_tiles, alibis, features, gradients, dropouts,
    many_queries, many_heads, many_keys, latent)}
