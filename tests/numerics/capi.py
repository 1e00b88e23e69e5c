"""The C functions through the generated raw layer, with statuses as exceptions."""
import os
import pathlib
import sys

try:
    from flashattn._native import ffi
except ImportError:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bindings" / "python"))
    from flashattn._native import ffi
from flashattn._constants import Reason

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "u8": 5}
FORWARD, BACKWARD = 1, 2
LSE, SINK, DLSE, DBIAS, DSINK = 1, 2, 4, 8, 16
UNSUPPORTED = 2

_library = None


def library():
    global _library
    if _library is None:
        _library = ffi.dlopen(os.environ["FLASHATTN_LIBRARY"])
    return _library


class Refused(Exception):
    """A status other than OK, with the library's sentence. asked: the fields of the descriptor
    whose plan was refused; None of a call."""
    asked = None

    def __init__(self, status):
        reason, field = ffi.new("int32_t *"), ffi.new("const char **")
        sentence = ffi.string(library().flashattn_last_error(reason, field)).decode()
        name = ffi.string(library().flashattn_status_name(status)).decode()
        super().__init__("%s: %s" % (name, sentence))
        self.status, self.reason, self.field = status, reason[0], ffi.string(field[0]).decode()


def check(status):
    if status:
        raise Refused(status)


def need_gpu():
    """Says what to do where the library is for CPUs only, or the machine has no GPU."""
    fields = dict(struct_size=ffi.sizeof("flashattn_desc"), device=1, dtype=2, heads_q=1, dim_qk=8)
    try:
        check(library().flashattn_check(ffi.new("flashattn_desc *", fields)))
    except Refused as refused:
        remedy = {Reason.NO_DEVICE: "", Reason.NO_CUDA_BUILD: (
            ". ./run build --cuda makes one: FLASHATTN_LIBRARY=build/cuda/src/libflashattn.so; "
            "./run test --device cuda makes and tests one")}
        if refused.reason in remedy:
            raise RuntimeError(str(refused) + remedy[refused.reason]) from None


def pointer(address, kind="void *"):
    return ffi.cast(kind, address)


def descriptor(case, device):
    """The fields of flashattn_desc that a case sets."""
    both = case.backward
    fields = dict(
        struct_size=ffi.sizeof("flashattn_desc"), device=device.kind,
        ops=FORWARD | (BACKWARD if both else 0),
        dtype=DTYPES[case.dtype], dtype_o=DTYPES[case.dtype_o], heads_q=case.heads_q,
        heads_kv=case.heads_kv, dim_qk=case.dim_qk, dim_v=case.dim_v,
        layout=(case.cu_q is not None) | (case.cu_kv is not None) << 1 | (case.page_size > 0) << 2,
        page_size=case.page_size,
        mask=(case.causal | (case.window is not None) << 1 | (case.chunk > 0) << 2
              | case.top_left << 3 | (case.blocks is not None) << 4),
        chunk=case.chunk, bias=bool(case.alibi) | bool(case.bias) << 1,
        features=(LSE * case.lse | SINK * case.sink | DLSE * (both and case.dlse)
                  | DBIAS * (both and case.dbias is not None) | DSINK * (both and case.dsink)),
        determinism=case.determinism, scale=case.scale, softcap=case.softcap,
        dropout=case.dropout, splits=case.splits,
        threads=case.threads if device.name == "cpu" else 0)
    if case.window is not None:
        fields["window_left"], fields["window_right"] = case.window
    if case.blocks is not None:
        fields["block_q"], fields["block_kv"] = case.blocks
    if case.bias:
        fields["bias_dtype"] = DTYPES[case.bias]
    return fields


def shape_of(case):
    return dict(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv,
                total_q=sum(case.cu_q) if case.cu_q is not None else 0,
                total_kv=sum(case.cu_kv) if case.cu_kv is not None else 0)


class Plan:
    def __init__(self, fields):
        self.handle = None
        out = ffi.new("flashattn_plan **")
        try:
            check(library().flashattn_plan_create(ffi.new("flashattn_desc *", fields), out))
        except Refused as refused:
            refused.asked = fields
            raise
        self.handle = out[0]

    def __del__(self):
        if self.handle is not None:
            library().flashattn_plan_destroy(self.handle)

    def workspace_size(self, op, shape):
        """shape: fields of flashattn_shape, or None for the promised maxima."""
        size = ffi.new("int64_t *", -1)
        native = ffi.NULL if shape is None else ffi.new("flashattn_shape *", shape)
        check(library().flashattn_workspace_size(self.handle, op, native, size))
        return size[0]

    def info(self, op, shape):
        """shape: as above."""
        native = ffi.NULL if shape is None else ffi.new("flashattn_shape *", shape)
        out = ffi.new("flashattn_plan_properties *",
                      {"struct_size": ffi.sizeof("flashattn_plan_properties")})
        check(library().flashattn_plan_info(self.handle, op, native, out))
        return out

    def run(self, op, fields, workspace, size, stream=0):
        name = "forward" if op == FORWARD else "backward"
        struct = "flashattn_%s_args" % name
        args = ffi.new(struct + " *", dict(fields, struct_size=ffi.sizeof(struct)))
        check(getattr(library(), "flashattn_" + name)(
            self.handle, args, pointer(workspace), size, pointer(stream)))

    def dropout_mask(self, fields, keep, stream=0):
        struct = "flashattn_forward_args"
        args = ffi.new(struct + " *", dict(fields, struct_size=ffi.sizeof(struct)))
        check(library().flashattn_dropout_mask(self.handle, args, pointer(keep, "uint8_t *"),
                                               pointer(stream)))

    def merge(self, fields, part_o, part_lse, stream=0):
        """part_o: fields of flashattn_tensor; part_lse: addresses."""
        tensors = ffi.new("flashattn_tensor[]", part_o)
        logs = ffi.new("float *[]", [pointer(x, "float *") for x in part_lse])
        struct = "flashattn_merge_args"
        args = ffi.new(struct + " *", dict(
            fields, struct_size=ffi.sizeof(struct), parts=len(part_o), part_o=tensors,
            part_lse=ffi.cast("const float * const *", logs)))
        check(library().flashattn_merge(self.handle, args, pointer(stream)))
