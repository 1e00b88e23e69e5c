"""Where arrays lie in memory, and buffers that notice every byte written where none should be."""
import numpy as np

from .dtypes import NUMPY

# All bits set: NaN in every float format, and never what arithmetic makes of a NaN.
FILL = 0xFF
GUARD = 192


class Buffer:
    """Elements in device memory between two guards, filled with FILL, aligned to the element only,
    or to what the device asks for.
    `host` is what the device should hold where the library writes nothing."""

    def __init__(self, device, dtype, elements, skew=1):
        self.device = device
        self.dtype = NUMPY.get(dtype) or np.dtype(dtype)
        self.start = GUARD + skew * max(self.dtype.itemsize, device.alignment)
        size = elements * self.dtype.itemsize
        self.image = np.full(self.start + size + GUARD, FILL, np.uint8)
        self.host = self.image[self.start:self.start + size].view(self.dtype)
        self.base, self.handle = device.allocate(len(self.image))
        self.address = self.base + self.start
        # The elements that the library should write, and those that it may set to zero.
        self.owned = np.zeros(elements, bool)
        self.optional = None

    def __del__(self):
        if hasattr(self, "handle"):
            self.device.free(self.handle)

    def push(self):
        self.device.write(self.base, self.image)

    def pull(self, what):
        """Reads the device's contents after checking that only owned elements changed."""
        image = self.device.read(self.base, len(self.image))
        end = self.start + self.host.nbytes
        assert np.array_equal(image[:self.start], self.image[:self.start]), \
            "%s: bytes before the array were written" % what
        assert np.array_equal(image[end:], self.image[end:]), \
            "%s: bytes after the array were written" % what
        width = np.dtype("u%d" % self.dtype.itemsize)
        after = image[self.start:end].copy()
        changed = after.view(width) != self.host.view(width)
        changed &= ~self.owned
        if self.optional is not None:
            changed &= ~(self.optional & (after.view(width) == 0))
        if changed.any():
            where = np.flatnonzero(changed)
            raise AssertionError("%s: %d elements outside of it were written, the first at %d"
                                 % (what, len(where), where[0]))
        return after.view(self.dtype)

    def take(self, other):
        """Becomes as another buffer is, which is no longer than this one."""
        count = len(other.host)
        assert other.dtype == self.dtype and count <= len(self.host)
        self.image[self.start:len(self.image) - GUARD] = FILL
        self.host[:count] = other.host
        self.owned[:] = False
        self.owned[:count] = other.owned
        self.optional = None
        if other.optional is not None:
            self.optional = np.zeros_like(self.owned)
            self.optional[:count] = other.optional

    def accept(self, values):
        """Makes what the device holds the new state that must not change."""
        self.host[:] = values
        self.owned[:] = False
        self.optional = None


class Placement:
    """index[b]: flat positions (rows in use, heads, dim) of sequence b; strides as the C structure
    wants them; elements: the size of the array."""

    def __init__(self, strides, elements, index, base=0):
        self.strides, self.elements, self.index, self.base = strides, elements, index, base


def positions(starts, heads, dim, head_stride, base=0):
    """Flat positions of rows that start at `starts`."""
    return (base + np.asarray(starts, np.int64)[:, None, None]
            + np.arange(heads)[None, :, None] * head_stride + np.arange(dim)[None, None, :])


def place(mode, capacities, lengths, starts, heads, dim, varlen=False, is_input=True, name="",
          row=None, base=0, unit=1):
    """An array (batch, capacity, heads, dim), or varlen (sum of capacities, heads, dim). starts:
    the first rows in use of each sequence. unit: what padding is a multiple of."""
    batch, total = len(capacities), sum(capacities)
    longest = max(capacities, default=0)
    rows, blocks = (max(total, 1), 1) if varlen else (max(longest, 1), batch)
    head, seq = dim, heads * dim
    step = rows * seq
    repeats = is_input and name in ("q", "k", "v", "dout")
    if mode == "bhsd":
        head, seq = rows * dim, dim
    elif mode == "sbhd" and not varlen:
        seq, step = batch * heads * dim, heads * dim
    elif mode == "qkv":
        seq, step = row, rows * row
    elif mode == "padded" or (mode == "broadcast" and not repeats):
        head = dim + 3 * unit
        seq = heads * head + 5 * unit
        step = rows * seq + 7 * unit
    elif mode == "broadcast":
        if name == "q":
            step = 0 if not varlen else step
        else:
            head, seq = 0, dim
            step = rows * seq
    first = np.concatenate([[0], np.cumsum(capacities)[:-1]]) * seq if varlen \
        else np.arange(batch) * step
    index = [positions(first[b] + (starts[b] + np.arange(lengths[b])) * seq, heads, dim, head, base)
             for b in range(batch)]
    elements = (max(blocks - 1, 0) * (0 if varlen else step) + (rows - 1) * seq
                + (heads - 1) * head + dim)
    if total == 0 or batch == 0:
        elements = 0
    strides = (-1, -1, -1) if mode == "packed" else (0 if varlen else step, head, seq)
    return Placement(strides, elements, index, base)


def place_pages(mode, lengths, page_size, heads, dim, pages, unit):
    """A pool of pages; pages[b]: the page numbers of sequence b."""
    count = max([p + 1 for numbers in pages for p in numbers], default=0) + 1
    pool = place("padded" if mode in ("qkv", "broadcast") else mode, [page_size] * count,
                 [page_size] * count, [0] * count, heads, dim, unit=unit)
    index = []
    for b, length in enumerate(lengths):
        tokens = [pool.index[p] for p in pages[b]]
        index.append(np.concatenate(tokens)[:length] if tokens
                     else np.zeros((0, heads, dim), np.int64))
    return Placement(pool.strides, pool.elements, index), count
