"""Calls of flashattn_append_kv, and what they must write. A case says what forward sees afterwards:
its queries are the new tokens, and its lengths of keys include them."""
import dataclasses
from typing import Optional

import numpy as np

from . import capi
from .buffers import FILL, place
from .dtypes import round_to
from .harness import Call

LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "lens_q", "starts_kv", "page_table", "pages",
           "descale_k", "descale_v")


@dataclasses.dataclass
class Rotary:
    dim: int
    interleaved: bool = False
    base: float = 0.0            # 0: tables
    table: str = "f32"           # their dtype
    gap: int = 0                 # elements between rows of the tables
    positions: Optional[list] = None


class Append(Call):
    """new: of q, k and v, which are given. wide: the dtype of new tokens. in_place: q_out is q and
    lens_out is lens_kv. updates: descales are made; those of blocks without a token are NaN."""

    def __init__(self, case, device, rotary=None, new="qkv", wide=None, in_place=False, plan=None,
                 seed=0, updates=False):
        super().__init__(case, device, plan=plan)
        self.rotary, self.new, self.in_place = rotary, new, in_place
        self.wide = wide or case.dtype
        self.rng = np.random.default_rng(seed + 5)
        self.old = [case.length_kv(b) - case.length_q(b) for b in range(case.batch)]
        assert min(self.old, default=0) >= 0
        self.tokens, self.new_places = {}, {}
        fields = {name: self.inputs[name] for name in LENGTHS if name in self.inputs}
        fields.update(self.sizes, dtype=capi.DTYPES[self.wide])
        if "k" not in new and "v" not in new:
            self.outputs = []
        else:
            self.outputs = ["lens_out"]
        before = [n + case.start_kv(b) for b, n in enumerate(self.old)]
        self.lens_buffer = self.add("lens_before", np.int32, case.batch)
        self.lens_buffer.host[:] = before
        fields["lens_kv"] = capi.pointer(self.lens_buffer.address, "int32_t *")
        if self.outputs:
            if in_place:
                self.buffers["lens_out"] = self.lens_buffer
            else:
                self.add("lens_out", np.int32, case.batch)
            self.buffers["lens_out"].owned[:] = True
            fields["lens_out"] = capi.pointer(self.buffers["lens_out"].address, "int32_t *")
        for name in new:
            self.add_tokens(name, fields)
        if rotary:
            self.add_rotary(fields)
        if updates:
            fields["update_descales"] = 1
            for name in set("kv") & set(new):
                self.own_blocks(name)
        self.fields = fields

    def own_blocks(self, name):
        """Descales of blocks with new tokens are written, and what these blocks held may be."""
        case, block, descales = self.case, self.case.descale_block, self.buffers["descale_" + name]
        for b, old in enumerate(self.old):
            if not case.length_q(b):
                continue
            places = self.descale_places[name][b]
            first = old // block
            descales.owned[places[:, first:-(-case.length_kv(b) // block)]] = True
            descales.host[places[:, -(-old // block):]] = np.nan
            self.buffers[name].owned[self.places[name].index[b][first * block:old]] = True
        self.outputs.append("descale_" + name)

    def add_tokens(self, name, fields):
        case = self.case
        heads = case.heads_q if name == "q" else case.heads_kv
        dim = case.dim_v if name == "v" else case.dim_qk
        lengths = [case.length_q(b) for b in range(case.batch)]
        where = place("padded" if case.strides in ("broadcast", "qkv") else case.strides,
                      [case.capacity_q(b) for b in range(case.batch)], lengths,
                      [0] * case.batch, heads, dim, case.cu_q is not None, unit=self.device.padding)
        values = [round_to(self.rng.standard_normal((n, heads, dim)), self.wide) for n in lengths]
        if case.strides == "broadcast" and name != "q":  # as forward sees the cache
            values = [np.repeat(x[:, :1], heads, 1) for x in values]
        self.tokens[name], self.new_places[name] = values, where
        for kind in ("new_" + name, "q_out") if name == "q" else ("new_" + name,):
            if kind == "q_out" and self.in_place:
                self.buffers[kind] = self.buffers["new_q"]
                self.buffers[kind].owned[:] = False
            else:
                self.add(kind, self.wide, where.elements)
            buffer = self.buffers[kind]
            for b, index in enumerate(where.index):
                if kind == "q_out":
                    buffer.owned[index] = True
                else:
                    buffer.host[index] = values[b]
            batch, head, seq = where.strides
            fields["q_out" if kind == "q_out" else name] = dict(
                data=capi.pointer(buffer.address), stride_batch=batch, stride_head=head,
                stride_seq=seq)
        if name == "q":
            self.places["q_out"] = where
            self.outputs.append("q_out")
            return
        cache = self.buffers[name]
        width = np.dtype("u%d" % cache.dtype.itemsize)
        for b, index in enumerate(self.places[name].index):
            cache.host.view(width)[index[self.old[b]:]] = np.array(FILL * 0x01010101, "u4").astype(
                width)
            cache.owned[index[self.old[b]:]] = True
        fields[name + "_cache"] = self.inputs[name]
        self.outputs.append(name)

    def first_position(self, b):
        return self.rotary.positions[b] if self.rotary.positions else self.old[b]

    def add_rotary(self, fields):
        rotary, case = self.rotary, self.case
        pairs = rotary.dim // 2
        fields.update(rotary=int(rotary.interleaved), rotary_dim=rotary.dim)
        if rotary.positions:
            fields["positions"] = capi.pointer(
                self.put("positions", np.int32, np.array(rotary.positions, np.int32)), "int32_t *")
        if rotary.base:
            fields["rotary_base"] = rotary.base
            return
        rows = max((self.first_position(b) + case.length_q(b) for b in range(case.batch)),
                   default=0) or 1
        angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
        self.table = [round_to(f(angles), rotary.table) for f in (np.cos, np.sin)]
        fields.update(rotary_positions=rows, dtype_rotary=capi.DTYPES[rotary.table])
        for name, values in zip(("rotary_cos", "rotary_sin"), self.table):
            row = pairs + rotary.gap
            buffer = self.add(name, rotary.table, (rows - 1) * row + pairs)
            buffer.host[np.arange(rows)[:, None] * row + np.arange(pairs)] = values
            fields[name] = dict(capi.PACKED, data=capi.pointer(buffer.address),
                                stride_seq=row if rotary.gap else -1)

    def stage_append(self):
        for buffer in set(self.buffers.values()):
            buffer.push()
        return lambda stream: self.plan.append_kv(self.fields, stream)

    def append(self):
        """What the call wrote, by sequence: new rows of k and v, q_out, lens_out."""
        self.device.launch(self.stage_append())
        out = self.collect(self.outputs)
        made = {name: self.take(name, out[name]) for name in self.outputs if name in self.places}
        for name in self.descale_places:
            if "descale_" + name in out:
                made["descale_" + name] = out["descale_" + name][self.descale_places[name]]
                made["held_" + name] = [x[:n] for x, n in zip(made[name], self.old)]
        for name in "kv":
            if name in made:
                made[name] = [x[n:] for x, n in zip(made[name], self.old)]
        if "lens_out" in out:
            made["lens_out"] = out["lens_out"].tolist()
        for name in self.outputs:
            self.buffers[name].accept(out[name])
        return made

    # ---- what must be written

    def turned(self, name, b, kind=np.float64):
        """Rows of q or k of a sequence, rotated, in float64 or as fp32 computes them."""
        x = self.tokens[name][b].astype(kind)
        rotary = self.rotary
        if not rotary or name == "v":
            return x
        pairs = rotary.dim // 2
        rows = self.first_position(b) + np.arange(len(x))
        if rotary.base:
            angles = rows[:, None] * float(rotary.base) ** (-np.arange(pairs) / pairs)
            cos, sin = np.cos(angles), np.sin(angles)
        else:
            cos, sin = (table[rows] for table in self.table)
        cos, sin = (t.astype(kind)[:, None] for t in (cos, sin))
        at = np.arange(pairs)
        first, second = (2 * at, 2 * at + 1) if rotary.interleaved else (at, at + pairs)
        out = x.copy()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., first] * sin + x[..., second] * cos
        return out

    def factors(self, name, b):
        """What a row of k or v of a sequence is multiplied by, (rows, heads, 1) in fp32."""
        case, descales = self.case, self.data.descales.get(name)
        if descales is None:
            return np.float32(1)
        row = self.old[b] + np.arange(case.length_q(b))
        block = row // case.descale_block if case.descale_block else 0 * row
        chosen = descales[b if len(descales) > 1 else 0]
        block = block if chosen.shape[-1] > 1 else 0 * block
        return np.float32(1) / chosen[:, block].T[..., None]
