"""The arguments of a block mask: a number for each block, or lists of blocks, and lengths of
blocks."""
import numpy as np

from . import capi


def block_fields(call):
    """Fields of flashattn_args of a case with a block mask."""
    case, data = call.case, call.data
    dims = [c in case.block_dims for c in "bh"]
    fields = {}
    if case.block_lists:
        fields = list_fields(call, dims)
    else:
        fields["block_mask"], buffer, index = call.strided(
            "block_mask", "u8", data.block_mask.shape, dims + [True])
        buffer.host[index] = data.block_mask
    if case.block_lens is not None:
        fields["block_lens"] = numbers(call, "block_lens", data.block_lens,
                                       [c in case.block_lens for c in "bh"])
    return fields


def numbers(call, name, values, dims):
    """A (batch|1, heads|1, blocks) array of int32, as flashattn_tensor has it."""
    field, buffer, index = call.strided(name, np.int32, (*values.shape, 1), dims + [True])
    buffer.host[index] = values[..., None]
    return field


def list_fields(call, dims):
    """Lists in a random order: rows that -1 fills, or what is no block of a sequence of these sizes
    ("padded"); rows that say where they end ("ends"), behind which stands anything; all rows of a
    head in one, one behind the other ("rows")."""
    on, form = call.data.block_mask, call.case.block_lists
    rng = np.random.default_rng(call.case.seed + 2)
    batch, heads, rows, columns = on.shape
    lists = [[[rng.permutation(np.flatnonzero(row)) for row in head] for head in sequence]
             for sequence in on]
    counts = on.sum(-1).astype(np.int32)
    if form == "rows":
        ends = np.cumsum(counts, -1, dtype=np.int32)
        entries = int(ends.max(initial=0)) + 1
        index = rng.integers(0, columns + 1, (batch, heads, 1, entries), dtype=np.int32)
    else:
        ends, entries = counts, columns + 3
        index = rng.integers(0, columns + 1, (batch, heads, rows, entries), dtype=np.int32)
        if form == "padded":
            index[:] = rng.choice([-1, -2, columns, 2**31 - 1, -2**31], index.shape)
    begins = ends - counts if form == "rows" else np.zeros_like(ends)
    for b, h, y in np.ndindex(batch, heads, rows):
        row = index[b, h, 0 if form == "rows" else y]
        row[begins[b, h, y]:ends[b, h, y]] = lists[b][h][y]
    fields = {"block_entries": entries}
    fields["block_index"], buffer, at = call.strided(
        "block_index", np.int32, index.shape, dims + [form != "rows"])
    buffer.host[at] = index
    if form != "padded":
        fields["block_end"] = numbers(call, "block_end", ends, dims)
    if form == "rows":
        fields["block_begin"] = numbers(call, "block_begin", begins, dims)
    return fields
