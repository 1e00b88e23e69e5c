"""Runs a case through the C functions and hands back logical arrays. All memory is filled with NaN
beforehand and checked afterwards for writes where none belong."""
import dataclasses
from typing import Any, List, Optional

import numpy as np

from . import capi
from .block_lists import block_fields
from .buffers import FILL, Buffer, Placement, place, place_pages
from .data import make_data
from .latent import cache_fields


@dataclasses.dataclass
class Result:
    """Per sequence: o (rows, heads, dim_v), lse (heads, rows), dq, dk, dv like q, k, v. For all:
    dbias (batch|1, heads|1, rows|1, keys), dsink (heads). float32."""
    o: List[np.ndarray]
    lse: Optional[List[np.ndarray]] = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsink: Any = None
    amax_o: Any = None  # (batch|1, heads|1)
    # Whether the kernels computed with copies of K and V: see data.with_copies(). No field.
    copied = False
    fp16 = False  # whether weights were rounded to fp16, whatever the type of q

    def bits(self, *names):
        """The named results as bytes, for bitwise comparison."""
        parts = []
        for name in names or [f.name for f in dataclasses.fields(self)]:
            value = getattr(self, name)
            if value is not None:
                parts += [x.tobytes() for x in (value if isinstance(value, list) else [value])]
        return b"|".join(parts)


class Call:
    """The buffers and arguments of one case on one device."""

    workspace_shift = 0  # bytes

    def __init__(self, case, device, data=None, plan=None):
        self.case, self.device = case, device
        self.data = make_data(case) if data is None else data
        self.plan = plan or capi.Plan(capi.descriptor(case, device))
        self.sizes = capi.sizes_of(case)
        self.buffers = {}
        self.places = {}
        self.inputs = self.make_inputs()

    # ---- buffers

    def add(self, name, dtype, elements, skew=1):
        self.buffers[name] = Buffer(self.device, dtype, elements, skew)
        return self.buffers[name]

    def put(self, name, dtype, values):
        """A plain contiguous input; its address."""
        buffer = self.add(name, dtype, values.size)
        buffer.host[:] = values.ravel()
        return buffer.address

    def qkv_base(self, name):
        """Where q, k, v start in a token of packed QKV, and the elements of a token."""
        case = self.case
        sizes = (case.heads_q * case.dim_qk, case.heads_kv * case.dim_qk,
                 case.heads_kv * case.dim_v)
        at = "qkv".index(name)
        return dict(base=sum(sizes[:at]), row=sum(sizes))

    def packs_qkv(self):
        case = self.case
        return (case.strides == "qkv" and not case.page_size and case.cu_q == case.cu_kv
                and case.dtype == case.dtype_kv
                and case.seqlen_q == case.seqlen_kv)

    def tensor(self, name, dtype, values=None, like=None):
        """Fields of flashattn_tensor for an array shaped like q, k, v or o (= like); an input when
        it has values, else an output, whose rows in use it owns."""
        case, like = self.case, like or name
        is_input = values is not None
        rows_q = like in "qo"
        heads = case.heads_q if rows_q else case.heads_kv
        dim = {"q": case.dim_qk, "k": case.columns_k}.get(like, case.dim_v)
        if name == "descale_latent":
            dim = case.latent_descales
        side = "q" if rows_q else "kv"
        capacities, lengths = ([getattr(case, kind + side)(b) for b in range(case.batch)]
                               for kind in ("capacity_", "length_"))
        mode, share = case.strides, None
        if case.v_in_k and name in ("k", "v"):
            if name == "v":
                return self.v_of_k(values)
            mode = "bshd" if mode == "packed" else mode  # K's strides serve V
        extra = {}
        if self.packs_qkv() and like in "qkv":
            extra, share = self.qkv_base(like), "qkv" if is_input else "dqkv"
        elif mode in ("qkv", "record"):
            mode = "padded"
        if case.page_size and not rows_q:
            where, self.page_count = place_pages(mode, lengths, case.page_size, heads, dim,
                                                 self.page_lists, self.device.padding)
        else:
            starts = [0 if rows_q else case.start_kv(b) for b in range(case.batch)]
            where = place(mode, capacities, lengths, starts, heads, dim,
                          getattr(case, "cu_" + side) is not None, is_input, name,
                          unit=self.device.padding, **extra)
        buffer = self.buffers.get(share) if share else None
        if buffer is None:
            size = where.elements
            if share:
                token = extra["row"]
                size = token * (sum(capacities) if case.cu_q is not None
                                else case.batch * case.seqlen_q)
            buffer = self.add(share or name, dtype, size)
        self.buffers[name] = buffer
        self.places[name] = where
        for b, index in enumerate(where.index):
            if is_input:
                buffer.host[index] = values[b]
            else:
                buffer.owned[index] = True
        return self.tensor_field(name)

    def tensor_field(self, name):
        buffer, where = self.buffers[name], self.places[name]
        batch, head, seq = where.strides
        return dict(data=capi.pointer(buffer.address + where.base * buffer.dtype.itemsize),
                    stride_batch=batch, stride_head=head, stride_seq=seq)

    def v_of_k(self, values):
        """V as a view of K's buffer."""
        where = self.places["k"]
        index = [each[..., :self.case.dim_v] for each in where.index]
        self.buffers["v"] = self.buffers["k"]
        self.places["v"] = Placement(where.strides, where.elements, index, where.base)
        for at, expected in zip(index, values):
            assert np.array_equal(self.buffers["v"].host[at], expected)
        return self.tensor_field("v")

    def take(self, name, contents):
        return [contents[index].astype(np.float32) for index in self.places[name].index]

    def strided(self, name, dtype, shape, sizes):
        """A (batch|1, heads|1, rows|1, keys) array: fields of flashattn_tensor, the buffer, and the
        positions of that shape; sizes says where a 1 is a broadcast, i.e. stride 0."""
        gap = 0 if self.case.strides == "packed" else 3
        row = shape[3] + gap
        steps = (shape[1] * shape[2] * row + gap, shape[2] * row, row, 1)
        elements = max((shape[0] - 1) * steps[0] + shape[1] * shape[2] * row, 0)
        buffer = self.add(name, dtype, elements)
        flat = np.arange(shape[3])
        index = sum((np.arange(n) * step).reshape([-1 if a == axis else 1 for a in range(4)])
                    for axis, (n, step) in enumerate(zip(shape[:3], steps))) + flat
        packed = all(sizes) and not gap
        strides = [-1 if packed else step if size else 0 for size, step in zip(sizes, steps)]
        return dict(zip(capi.PACKED, strides), data=capi.pointer(buffer.address)), buffer, index

    def make_inputs(self):
        case, data = self.case, self.data
        rng = np.random.default_rng(case.seed + 1)
        fields = {}
        if case.page_size:
            needed = [-(-case.length_kv(b) // case.page_size) for b in range(case.batch)]
            # Some pages belong to nobody; entries past the last page in use are not page numbers.
            # Page 0 is one where pages are hidden: the nearest number to a hidden page's.
            numbers = rng.permutation(sum(needed) + 3) + (case.hidden is not None)
            cuts = np.concatenate([[0], np.cumsum(needed)]).astype(int)
            self.page_lists = [numbers[cuts[b]:cuts[b + 1]].tolist() for b in range(case.batch)]
            width = -(-case.seqlen_kv // case.page_size)
            gap = 0 if case.strides == "packed" else 2
            stride = width + gap
            table = np.full((case.batch, stride), -1, np.int32)
            for b, numbers in enumerate(self.page_lists):
                table[b, :len(numbers)] = numbers
                if case.hidden is not None:
                    hidden = np.flatnonzero(data.hidden_pages[b, :len(numbers)])
                    table[b, hidden] = -1 - hidden
            fields["page_table"] = dict(
                capi.PACKED, data=capi.pointer(self.put("page_table", np.int32, table)),
                stride_batch=stride if gap else -1)
        fields["q"] = self.tensor("q", case.dtype, data.q)
        if case.descale_dim:
            fields.update(cache_fields(self))
        else:
            for name in "kv":
                fields[name] = self.tensor(name, case.dtype_kv, getattr(data, name))
        if case.page_size:
            fields["pages"] = self.page_count
        for side in ("q", "kv"):
            rows = getattr(case, "cu_" + side)
            if rows is not None:
                cu = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
                fields["cu_seqlens_" + side] = capi.pointer(
                    self.put("cu_" + side, np.int32, cu), "int32_t *")
        for name in ("lens_q", "lens_kv", "starts_kv"):
            if getattr(case, name) is not None:
                values = np.array(getattr(case, name), np.int32)
                fields[name] = capi.pointer(self.put(name, np.int32, values), "int32_t *")
        self.add_descales(fields)
        self.add_score_inputs(fields)
        return fields

    def add_descales(self, fields):
        case, data = self.case, self.data
        self.descale_places = {}
        for name, values in data.descales.items():
            fields["descale_" + name], buffer, index = self.strided(
                "descale_" + name, "f32", (*values.shape, 1),
                [letter in case.descales for letter in "bht"])
            self.descale_places[name] = index[..., 0]
            # Only what some sequence uses: the rest stays NaN.
            for b in range(case.batch):
                rows = case.length_q(b) if name == "q" else case.length_kv(b)
                used = -(-rows // case.descale_block) if case.descale_block else min(rows, 1)
                at = b if len(values) > 1 else 0
                buffer.host[index[at, :, :used, 0]] = values[at, :, :used]
        if data.scale_o is not None:
            fields["scale_o"], buffer, index = self.strided(
                "scale_o", "f32", (*data.scale_o.shape, 1, 1), [True] * 3)
            buffer.host[index[:, :, 0, 0]] = data.scale_o

    def add_score_inputs(self, fields):
        case, data = self.case, self.data
        if case.bias:
            fields["bias"], buffer, index = self.strided(
                "bias", case.bias, data.bias.shape, [c in case.bias_dims for c in "bhr"])
            self.fill_rectangles(buffer, index, data.bias)
        if case.alibi:
            address = self.put("slopes", "f32", data.slopes)
            fields["alibi_slopes"] = dict(capi.PACKED, data=capi.pointer(address),
                                          stride_batch=-1 if "b" in case.alibi else 0)
        if case.sink:
            fields["sink"] = capi.pointer(self.put("sink", "f32", data.sink), "float *")
        if case.blocks:
            fields.update(block_fields(self))
        if case.tree:
            fields["tree_bits"] = self.tree_field(data.tree_bits)
        if case.dropout:
            seed, offset = case.rng
            if case.rng_device:
                on_device = (seed // 2, offset // 3)
                seed, offset = seed - on_device[0], offset - on_device[1]
                address = self.put("rng", np.uint64, np.array(on_device, np.uint64))
                fields["rng_device"] = capi.pointer(address, "uint64_t *")
            fields["rng_seed"], fields["rng_offset"] = seed, offset

    def tree_field(self, bits):
        case = self.case
        words = -(-case.tree // 32)
        field, buffer, index = self.strided(
            "tree_bits", np.uint32, (len(bits), 1, bits.shape[1], words),
            ["b" in case.tree_dims, True, "r" in case.tree_dims])
        # Nobody looks at the bits behind the last.
        padded = np.pad(bits, [(0, 0), (0, 0), (0, 32 * words - case.tree)], constant_values=True)
        packed = np.packbits(padded, -1, bitorder="little").view("<u4")
        for b in range(case.batch):
            rows, at = slice(case.length_q(b)), b if len(bits) > 1 else 0
            buffer.host[index[at, 0, rows]] = packed[at, rows]
        return field

    def rng_fields(self):
        return {name: value for name, value in self.inputs.items() if name.startswith("rng")}

    def rectangles(self):
        for b in range(self.case.batch):
            yield b, slice(self.case.length_q(b)), slice(self.case.length_kv(b))

    def fill_rectangles(self, buffer, index, values):
        """Only what some sequence uses: the rest stays NaN."""
        for b, rows, keys in self.rectangles():
            at = b if values.shape[0] > 1 else 0
            buffer.host[index[at, :, rows, keys]] = values[at, :, rows, keys]

    # ---- calls

    def stage(self, op, fields, workspace=None):
        """Everything in place on the device: what enqueues the call on a stream. workspace: the
        buffer to use, of several calls perhaps."""
        size = self.plan.workspace_size(op, self.sizes)
        shift = self.workspace_shift
        if workspace is None:
            workspace = Buffer(self.device, "u8", size + shift)
        self.buffers["workspace"] = workspace
        workspace.owned[shift:] = True
        for buffer in set(self.buffers.values()):
            buffer.push()
        fields = {**self.sizes, **self.inputs, **fields}
        address = workspace.address + shift if size else 0
        return lambda stream: self.plan.run(op, fields, address, size, stream)

    def collect(self, outputs):
        """Checks every buffer. The contents of the outputs."""
        contents = {name: buffer.pull(name) for name, buffer in self.buffers.items()}
        return {name: contents[name] for name in outputs}

    def execute(self, op, fields, outputs):
        self.device.launch(self.stage(op, fields))
        return self.collect(outputs)

    def lse_index(self):
        case = self.case
        heads = np.arange(case.heads_q)[:, None]
        for b in range(case.batch):
            rows = np.arange(case.length_q(b))[None, :]
            if case.cu_q is not None:
                yield heads * sum(case.cu_q) + sum(case.cu_q[:b]) + rows
            else:
                yield (b * case.heads_q + heads) * case.seqlen_q + rows

    def lse_like(self, name, values=None):
        """A float array laid out like lse; its address."""
        case = self.case
        rows = sum(case.cu_q) if case.cu_q is not None else case.batch * case.seqlen_q
        buffer = self.add(name, "f32", case.heads_q * rows)
        for b, index in enumerate(self.lse_index()):
            if values is None:
                buffer.owned[index] = True
            else:
                buffer.host[index] = values[b]
        return capi.pointer(buffer.address, "float *")

    def forward_fields(self):
        """The outputs of a forward call, made."""
        fields = {"o": self.tensor("o", self.case.dtype_o)}
        if self.case.lse:
            fields["lse"] = self.lse_like("lse")
        if self.case.amax_o is not None:
            sizes = [letter in self.case.amax_o for letter in "bh"]
            shape = [n if kept else 1 for n, kept in
                     zip((self.case.batch, self.case.heads_q), sizes)]
            fields["amax_o"], buffer, self.amax_index = self.strided(
                "amax_o", "f32", (*shape, 1, 1), [*sizes, False])
            buffer.owned[self.amax_index] = self.case.batch > 0
        return fields

    def forward(self):
        fields = self.forward_fields()
        names = list(fields)
        out = self.execute(capi.FORWARD, fields, names)
        case = self.case
        result = Result(self.take("o", out["o"]))
        if case.dtype_kv != case.dtype:
            info = self.plan.info(capi.FORWARD, self.sizes)
            why = capi.ffi.string(info.why).decode()
            result.copied = "on copies of K and V" in why or "16 bits in shared memory" in why
            result.fp16 = "fp16 in registers" in why
        if self.data.scale_o is not None:
            scale = self.data.scale_o[:, None, :, None]
            result.o = [o / scale[b if len(scale) > 1 else 0] for b, o in enumerate(result.o)]
        if case.amax_o is not None and case.batch:
            result.amax_o = out["amax_o"][self.amax_index][:, :, 0, 0]
        if case.lse:
            result.lse = [out["lse"][index] for index in self.lse_index()]
        for name in names:
            self.buffers[name].accept(out[name])
        self.o_field, self.lse_field = fields["o"], fields.get("lse")
        return result

    def give(self, o, lse):
        """Results of a larger attention, in place of a forward call."""
        self.o_field = self.tensor("o", self.case.dtype_o, o)
        self.lse_field = self.lse_like("lse", lse)

    def adopt(self, other):
        """Takes another call's contents into this one's memory, where they fit: what a program does
        that replays a graph with new data. The addresses stay, and scratch memory is nobody's."""
        for name, buffer in self.buffers.items():
            if name in other.buffers and name != "workspace":
                buffer.take(other.buffers[name])
                buffer.push()
        self.case, self.data, self.places = other.case, other.data, other.places

    def backward_fields(self):
        """The arrays of a backward call, and the names of its outputs."""
        case, data = self.case, self.data
        fields = {"o": self.o_field, "lse": self.lse_field,
                  "dout": self.tensor("dout", case.dtype_o, data.dout, like="o")}
        if case.dlse:
            fields["dlse"] = self.lse_like("dlse", data.dlse)
        for name in "qkv":
            fields["d" + name] = self.tensor("d" + name, case.dtype_grad, like=name)
        names = ["dq", "dk", "dv"]
        if case.dbias is not None:
            fields["dbias"] = self.dbias_field()
            names.append("dbias")
        if case.dsink:
            buffer = self.add("dsink", "f32", case.heads_q)
            buffer.owned[:] = True
            fields["dsink"] = capi.pointer(buffer.address, "float *")
            names.append("dsink")
        return fields, names

    def backward(self, result):
        fields, names = self.backward_fields()
        out = self.execute(capi.BACKWARD, fields, names)
        case = self.case
        for name in ("dq", "dk", "dv"):
            setattr(result, name, self.take(name, out[name]))
        if case.dbias is not None:
            whole = out["dbias"][self.dbias_index]
            # Pairs past a sequence's lengths: untouched, or zero.
            result.dbias = np.where(self.buffers["dbias"].owned[self.dbias_index], whole, 0)
        if case.dsink:
            result.dsink = out["dsink"]
        return result

    def dbias_field(self):
        case = self.case
        sizes = [n if c in case.dbias else 1 for c, n in
                 zip("bhr", (case.batch, case.heads_q, case.seqlen_q))]
        field, buffer, index = self.strided("dbias", "f32", tuple(sizes) + (case.seqlen_kv,),
                                            [c in case.dbias for c in "bhr"])
        buffer.optional = np.zeros_like(buffer.owned)
        buffer.optional[index] = True
        for b, rows, keys in self.rectangles():
            rows = rows if "r" in case.dbias else slice(None)
            if "b" in case.dbias:
                buffer.owned[index[b, :, rows, keys]] = True
            else:  # as large as the shape
                buffer.owned[index] = True
        self.dbias_index = index
        return field


def run(case, device, data=None, plan=None):
    """All operations of a case."""
    call = Call(case, device, data, plan)
    result = call.forward()
    return call.backward(result) if case.backward else result


def dropout_mask(case, device):
    """(batch, heads, rows, keys) bytes, as the library says."""
    call = Call(case, device)
    shape = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    buffer = call.add("keep", "u8", int(np.prod(shape)))
    buffer.owned[:] = True
    for each in set(call.buffers.values()):
        each.push()
    fields = dict(call.sizes, **call.rng_fields())
    device.launch(lambda stream: call.plan.dropout_mask(fields, buffer.address, stream))
    assert FILL not in (0, 1)
    return buffer.pull("keep").reshape(shape)
