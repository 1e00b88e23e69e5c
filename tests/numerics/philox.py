"""The dropout mask, written from the header's text: Philox4x32-7 (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, SC 2011), vectorised over calls."""
import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
ROUNDS = 7


def philox4x32(counter, key, rounds=ROUNDS):
    """counter: four and key: two integers or uint64 arrays below 2**32; four such arrays."""
    c = [np.asarray(x, np.uint64) for x in counter]
    key = list(key)
    low, shift = np.uint64(LOW), np.uint64(32)
    for _ in range(rounds):
        a = c[0] * np.uint64(MULTIPLIERS[0])
        b = c[2] * np.uint64(MULTIPLIERS[1])
        c = [(b >> shift) ^ c[1] ^ np.uint64(key[0]), b & low,
             (a >> shift) ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + WEYL[0]) & LOW, (key[1] + WEYL[1]) & LOW]
    return c


def numbers(seed, offset, head_index, rows, keys, first=0):
    """The 16-bit numbers u(i, j), (rows, keys), of head_index = b * heads_q + h; i from first."""
    i = np.arange(first, first + rows, dtype=np.int64)[:, None]
    j = np.arange(keys, dtype=np.int64)[None, :]
    shape = (rows, keys)
    counter = [np.broadcast_to(x, shape) for x in (
        ((j >> 4) << 5) | ((i & 7) << 2) | ((j & 7) >> 1), i >> 4,
        np.int64(head_index), np.int64(offset & LOW))]
    key = (seed & LOW, (seed >> 32) ^ (offset >> 32))
    words = np.stack(philox4x32(counter, key))
    which = np.broadcast_to(((j >> 3) & 1) * 2 + ((i >> 3) & 1), shape)
    word = np.take_along_axis(words, which[None], 0)[0]
    return np.where(j & 1, word >> np.uint64(16), word & np.uint64(0xFFFF)).astype(np.int64)


def threshold(p):
    """Of the 65536 values of u, those that drop."""
    return int(np.floor(float(np.float32(p)) * 65536 + 0.5))


def keep_mask(p, seed, offset, head_index, rows, keys, first=0):
    return numbers(seed, offset, head_index, rows, keys, first) >= threshold(p)
