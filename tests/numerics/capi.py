"""The C functions through the generated raw layer, with statuses as exceptions."""
import importlib.util
import os
import pathlib

from .dtypes import EIGHT_BITS


def generated(name):
    """A generated module of the Python package, without the package: that one loads a library."""
    package = importlib.util.find_spec("flashattn")
    folder = package.submodule_search_locations[0] if package else \
        pathlib.Path(__file__).parents[2] / "bindings" / "python" / "flashattn"
    spec = importlib.util.spec_from_file_location("raw" + name, pathlib.Path(folder, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ffi = generated("_native").ffi
HEADER_VERSION, Reason = (getattr(generated("_constants"), name)
                          for name in ("HEADER_VERSION", "Reason"))

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "f8": 4, "u8": 5, "i8": 6}
FORWARD, BACKWARD = 1, 2
SMOOTH_K, ROTATE = 1, 2
LSE, SINK, DLSE, DBIAS, DSINK = 1, 2, 4, 8, 16
UNSUPPORTED = 2
PACKED = dict(stride_batch=-1, stride_head=-1, stride_seq=-1)

_library = None


def library():
    global _library
    if _library is None:
        opened = ffi.dlopen(os.environ["FLASHATTN_LIBRARY"])
        version = opened.flashattn_version()
        if version // 100 != HEADER_VERSION // 100:
            raise ImportError("FLASHATTN_LIBRARY has version %d, the tests are for %d"
                              % (version, HEADER_VERSION))
        _library = opened
    return _library


class Refused(Exception):
    """A status other than OK, with the library's message. asked: the fields of the descriptor
    whose plan was refused; None of a call."""
    asked = None

    def __init__(self, status):
        reason, field = ffi.new("int32_t *"), ffi.new("const char **")
        message = ffi.string(library().flashattn_last_error(reason, field)).decode()
        name = ffi.string(library().flashattn_status_name(status)).decode()
        super().__init__("%s: %s" % (name, message))
        self.status, self.reason, self.field = status, reason[0], ffi.string(field[0]).decode()


def check(status):
    if status:
        raise Refused(status)


def device_properties(kind):
    """flashattn_device_properties of the first device of a kind."""
    found = ffi.new("flashattn_device_properties *",
                    {"struct_size": ffi.sizeof("flashattn_device_properties")})
    check(library().flashattn_device_info(kind, 0, found))
    return found


def need_gpu():
    """Says what to do where the library is for CPUs only, or the machine has no GPU."""
    fields = dict(struct_size=ffi.sizeof("flashattn_desc"), device=1, dtype=2, heads_q=1, dim_qk=8)
    try:
        check(library().flashattn_check(ffi.new("flashattn_desc *", fields), ffi.NULL))
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
        layout=((case.cu_q is not None) | (case.cu_kv is not None) << 1 | (case.page_size > 0) << 2
                | (case.descale_dim > 0) << 3),
        page_size=case.page_size,
        mask=(case.causal | (case.window is not None) << 1 | (case.chunk > 0) << 2
              | case.top_left << 3 | (case.blocks is not None) << 4 | (case.tree > 0) << 5
              | (case.hidden is not None) << 6 | bool(case.block_lists) << 7
              | (case.block_lens is not None) << 8),
        chunk=case.chunk, tree=case.tree, bias=bool(case.alibi) | bool(case.bias) << 1,
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
        fields["dtype_bias"] = DTYPES[case.bias]
    if case.dtype_kv in EIGHT_BITS:
        fields.update(dtype_kv=DTYPES[case.dtype_kv], descale_block=case.descale_block,
                      descale_dim=case.descale_dim)
    if both and case.dtype_grad != case.usual_grad:
        fields["dtype_grad"] = DTYPES[case.dtype_grad]
    return fields


def sizes_of(case):
    """The sizes in flashattn_args."""
    return dict(batch=case.batch, seqlen_q=case.seqlen_q, seqlen_kv=case.seqlen_kv,
                total_q=sum(case.cu_q) if case.cu_q is not None else 0,
                total_kv=sum(case.cu_kv) if case.cu_kv is not None else 0)


def args_of(fields, structure="flashattn_args"):
    """An argument structure: zero, and packed strides where the fields of a tensor say none."""
    args = ffi.new(structure + " *")
    check(getattr(library(), structure + "_init")(args, ffi.sizeof(structure)))
    for name, value in fields.items():
        setattr(args, name, value)
    return args


class Plan:
    def __init__(self, fields):
        self.handle = None
        out = ffi.new("flashattn_plan **")
        try:
            check(library().flashattn_plan_create(ffi.new("flashattn_desc *", fields), out,
                                                ffi.NULL))
        except Refused as refused:
            refused.asked = fields
            raise
        self.handle = out[0]

    def __del__(self):
        if self.handle is not None:
            library().flashattn_plan_destroy(self.handle)

    def workspace_size(self, op, sizes):
        """sizes: those of flashattn_args, or None for the plan's maxima."""
        size = ffi.new("int64_t *", -1)
        args = ffi.NULL if sizes is None else args_of(sizes)
        check(library().flashattn_workspace_size(self.handle, op, args, size))
        return size[0]

    def info(self, op, sizes):
        """sizes: as above."""
        args = ffi.NULL if sizes is None else args_of(sizes)
        out = ffi.new("flashattn_plan_properties *",
                      {"struct_size": ffi.sizeof("flashattn_plan_properties")})
        check(library().flashattn_plan_info(self.handle, op, args, out))
        return out

    def run(self, op, fields, workspace, size, stream=0):
        function = "flashattn_forward" if op == FORWARD else "flashattn_backward"
        check(getattr(library(), function)(
            self.handle, args_of(fields), pointer(workspace), size, pointer(stream)))

    def dropout_mask(self, fields, keep, stream=0):
        check(library().flashattn_dropout_mask(
            self.handle, args_of(fields), pointer(keep, "uint8_t *"), pointer(stream)))

    def quantize(self, fields, stream=0):
        check(library().flashattn_quantize(
            self.handle, args_of(fields, "flashattn_quantize_args"), pointer(stream)))

    def append_kv(self, fields, stream=0):
        check(library().flashattn_append_kv(
            self.handle, args_of(fields, "flashattn_append_kv_args"), pointer(stream)))

    def merge(self, fields, part_o, part_lse, stream=0):
        """part_o: fields of flashattn_tensor; part_lse: addresses."""
        tensors = ffi.new("flashattn_tensor[]", [dict(PACKED, **part) for part in part_o])
        logs = ffi.new("float *[]", [pointer(x, "float *") for x in part_lse])
        args = args_of(dict(fields, parts=len(part_o), part_o=tensors,
                            part_lse=ffi.cast("const float * const *", logs)),
                       "flashattn_merge_args")
        check(library().flashattn_merge(self.handle, args, pointer(stream)))
