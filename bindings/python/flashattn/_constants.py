# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""Names and numbers of the C header: enumerations, structure layout, documentation of functions."""
from enum import IntEnum, IntFlag
from typing import Dict, Tuple

HEADER_VERSION = 100


class Status(IntEnum):
    """What a call says of itself. Stored and returned as int32_t."""

    OK = 0
    #: A field, pointer or size that no library of this version could honour on any device.
    ERROR_INVALID_ARGUMENT = 1
    #: A meaningful request that no kernel family of this build honours on this device.
    ERROR_UNSUPPORTED = 2
    #: The workspace is smaller than flashattn_workspace_size says.
    ERROR_WORKSPACE = 3
    #: Host memory ran out.
    ERROR_OUT_OF_MEMORY = 4
    #: The device or its driver reported an error, or the wrong device is current.
    ERROR_DEVICE = 5
    #: struct_size is below the structure's required fields, above 4096, or larger than known with a
    #: part that is not zero: a newer header.
    ERROR_VERSION = 6
    #: A fault of the library itself. Please report it with the sentence.
    ERROR_INTERNAL = 7


class Reason(IntEnum):
    """Why a request was refused: the second half of flashattn_last_error. Stored as int32_t."""

    NONE = 0
    #: The library was built without CUDA.
    NO_CUDA_BUILD = 1
    #: No such device on this machine.
    NO_DEVICE = 2
    DRIVER_TOO_OLD = 3
    #: The GPU is older than the kernels need.
    ARCH = 4
    DTYPE = 5
    #: dtype and dtype_o, or dtype and bias_dtype, do not go together.
    DTYPE_MIX = 6
    HEAD_DIM_MULTIPLE = 7
    HEAD_DIM_MAX = 8
    HEAD_DIM_PAIR = 9
    #: heads_q is no multiple of heads_kv.
    HEAD_RATIO = 10
    LAYOUT = 11
    PAGE_SIZE = 12
    MASK_COMBINATION = 13
    BIAS = 14
    DROPOUT = 15
    SINK = 16
    SOFTCAP = 17
    DETERMINISM = 18
    WORKSPACE_LIMIT = 19
    SHARED_MEMORY = 20
    CPU_ISA = 21
    #: The kernel family was switched off when the library was built.
    NOT_IN_THIS_BUILD = 22
    #: The plan was not made for this operation: see flashattn_desc.ops.
    OP = 23
    #: A required pointer is NULL, or one that the plan does not use is not.
    NULL_POINTER = 24
    MISALIGNED = 25
    OVERLAP = 26
    #: A size is zero, negative, past a promised maximum, or overflows.
    SIZE = 27
    STRIDE = 28
    #: An enumerator or bit this library does not know, or a value outside its range.
    VALUE = 29
    RESERVED = 30
    STRUCT_SIZE = 31
    #: cu_seqlens, lens or a page table hold an impossible value (CPU only: read there).
    LENGTHS = 32
    STREAM = 33


class Device(IntEnum):
    """flashattn_device"""

    CPU = 0
    CUDA = 1


class Op(IntFlag):
    """Operations, as bits."""

    FORWARD = 1
    BACKWARD = 2


class Dtype(IntEnum):
    """flashattn_dtype"""

    #: Not set: the field's default.
    DEFAULT = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    #: 8-bit float, 4 exponent bits, no infinity (OCP E4M3).
    F8E4M3 = 4
    #: A byte: a boolean mask, 0 = hidden, anything else = visible.
    U8 = 5


class Layout(IntFlag):
    """How sequences lie in memory, as bits. None: dense (batch, seq, head, dim)."""

    #: Q, O and their gradients are (total_q, head, dim); cu_seqlens_q says where sequences start.
    VARLEN_Q = 1
    #: K, V and their gradients are (total_kv, head, dim); cu_seqlens_kv says where they start.
    VARLEN_KV = 2
    #: K and V are pools of pages (page, page_size, head, dim); page_table says which. Forward only,
    #: not together with VARLEN_KV.
    PAGED_KV = 4


class Mask(IntFlag):
    """Which keys a query sees, as bits: all must agree. With Sq, Sk the lengths of the sequence and
    off = Sk - Sq (TOP_LEFT: 0), query i sees key j when 0 <= j < Sk and
    """

    #: j <= i + off
    CAUSAL = 1
    #: i + off - window_left <= j <= i + off + window_right; a side of -1 is open
    WINDOW = 2
    #: floor((i + off) / chunk) == floor(j / chunk)
    CHUNK = 4
    #: Aligns i and j at the start of the sequence instead of at its end, for the masks above and
    #: for ALiBi.
    TOP_LEFT = 8
    #: block_mask[b, h, i / block_q, j / block_kv] != 0
    BLOCKS = 16


class Bias(IntFlag):
    """What is added to the scores, as bits."""

    #: - alibi_slopes[h] * |i + off - j|  (Press et al. 2022)
    ALIBI = 1
    #: + bias[b, h, i, j]; with bias_dtype U8 a boolean mask.
    DENSE = 2


class Feature(IntFlag):
    """Further inputs and outputs, as bits."""

    #: Forward writes lse.
    LSE = 1
    #: A learned logit per query head that takes part in the softmax and has no value vector.
    SINK = 2
    #: Backward adds the gradient that arrives at lse.
    DLSE = 4
    #: Backward writes the gradient of the dense bias.
    DBIAS = 8
    #: Backward writes the gradient of the sink.
    DSINK = 16


class Determinism(IntEnum):
    """Which results must repeat bit for bit. Each level includes the one before."""

    #: Whatever is fastest. On the CPU: always BATCH_INVARIANT.
    DEFAULT = 0
    #: The same call on the same device gives the same bits.
    RUN_TO_RUN = 1
    #: A sequence's bits do not depend on what else is in the batch.
    BATCH_INVARIANT = 2


class LogLevel(IntEnum):
    """flashattn_log_level"""

    OFF = 0
    #: The sentence of every call that fails.
    ERROR = 1
    #: Also: the kernel that each plan chose, and why.
    INFO = 2
    #: Also: every kernel family that refused, with its reason.
    DEBUG = 3


# Structure: (bytes, ((field, offset, bytes), ...)).
LAYOUT: Dict[str, Tuple[int, Tuple[Tuple[str, int, int], ...]]] = {
    "flashattn_desc": (184, (
        ("struct_size", 0, 4),
        ("device", 4, 4),
        ("device_index", 8, 4),
        ("ops", 12, 4),
        ("dtype", 16, 4),
        ("dtype_o", 20, 4),
        ("heads_q", 24, 4),
        ("heads_kv", 28, 4),
        ("dim_qk", 32, 4),
        ("dim_v", 36, 4),
        ("layout", 40, 4),
        ("page_size", 44, 4),
        ("mask", 48, 4),
        ("window_left", 52, 4),
        ("window_right", 56, 4),
        ("chunk", 60, 4),
        ("block_q", 64, 4),
        ("block_kv", 68, 4),
        ("bias", 72, 4),
        ("bias_dtype", 76, 4),
        ("features", 80, 4),
        ("determinism", 84, 4),
        ("scale", 88, 4),
        ("softcap", 92, 4),
        ("dropout", 96, 4),
        ("splits", 100, 4),
        ("max_batch", 104, 4),
        ("max_seqlen_q", 108, 4),
        ("max_seqlen_kv", 112, 4),
        ("sm_limit", 116, 4),
        ("threads", 120, 4),
        ("reserved0", 124, 4),
        ("max_total_q", 128, 8),
        ("max_total_kv", 136, 8),
        ("workspace_limit", 144, 8),
        ("reserved", 152, 32),
    )),
    "flashattn_shape": (32, (
        ("batch", 0, 4),
        ("seqlen_q", 4, 4),
        ("seqlen_kv", 8, 4),
        ("reserved", 12, 4),
        ("total_q", 16, 8),
        ("total_kv", 24, 8),
    )),
    "flashattn_tensor": (32, (
        ("data", 0, 8),
        ("stride_batch", 8, 8),
        ("stride_head", 16, 8),
        ("stride_seq", 24, 8),
    )),
    "flashattn_inputs": (320, (
        ("q", 0, 32),
        ("k", 32, 32),
        ("v", 64, 32),
        ("cu_seqlens_q", 96, 8),
        ("cu_seqlens_kv", 104, 8),
        ("lens_q", 112, 8),
        ("lens_kv", 120, 8),
        ("page_table", 128, 8),
        ("page_table_stride", 136, 8),
        ("pages", 144, 8),
        ("bias", 152, 8),
        ("bias_stride_batch", 160, 8),
        ("bias_stride_head", 168, 8),
        ("bias_stride_row", 176, 8),
        ("alibi_slopes", 184, 8),
        ("alibi_stride_batch", 192, 8),
        ("sink", 200, 8),
        ("block_mask", 208, 8),
        ("block_mask_stride_batch", 216, 8),
        ("block_mask_stride_head", 224, 8),
        ("block_mask_stride_row", 232, 8),
        ("descale_q", 240, 8),
        ("descale_k", 248, 8),
        ("descale_v", 256, 8),
        ("rng_seed", 264, 8),
        ("rng_offset", 272, 8),
        ("rng_device", 280, 8),
        ("reserved", 288, 32),
    )),
    "flashattn_forward_args": (432, (
        ("struct_size", 0, 4),
        ("reserved0", 4, 4),
        ("shape", 8, 32),
        ("inputs", 40, 320),
        ("o", 360, 32),
        ("lse", 392, 8),
        ("reserved", 400, 32),
    )),
    "flashattn_backward_args": (608, (
        ("struct_size", 0, 4),
        ("reserved0", 4, 4),
        ("shape", 8, 32),
        ("inputs", 40, 320),
        ("o", 360, 32),
        ("dout", 392, 32),
        ("lse", 424, 8),
        ("dlse", 432, 8),
        ("dq", 440, 32),
        ("dk", 472, 32),
        ("dv", 504, 32),
        ("dbias", 536, 8),
        ("dbias_stride_batch", 544, 8),
        ("dbias_stride_head", 552, 8),
        ("dbias_stride_row", 560, 8),
        ("dsink", 568, 8),
        ("reserved", 576, 32),
    )),
    "flashattn_merge_args": (136, (
        ("struct_size", 0, 4),
        ("parts", 4, 4),
        ("shape", 8, 32),
        ("part_o", 40, 8),
        ("part_lse", 48, 8),
        ("part_dtype", 56, 4),
        ("reserved0", 60, 4),
        ("o", 64, 32),
        ("lse", 96, 8),
        ("reserved", 104, 32),
    )),
    "flashattn_device_properties": (40, (
        ("struct_size", 0, 4),
        ("units", 4, 4),
        ("name", 8, 8),
        ("isa", 16, 8),
        ("compute_capability", 24, 4),
        ("local_memory", 28, 4),
        ("memory", 32, 8),
    )),
    "flashattn_plan_properties": (88, (
        ("struct_size", 0, 4),
        ("tile_q", 4, 4),
        ("tile_kv", 8, 4),
        ("stages", 12, 4),
        ("threads", 16, 4),
        ("registers", 20, 4),
        ("local_memory", 24, 4),
        ("splits", 28, 4),
        ("family", 32, 8),
        ("kernel", 40, 8),
        ("isa", 48, 8),
        ("why", 56, 8),
        ("flops", 64, 8),
        ("bytes", 72, 8),
        ("workspace", 80, 8),
    )),
}

# Function: its prototype and what the header says of it.
FUNCTIONS: Dict[str, str] = {
    "flashattn_version": """\
int32_t flashattn_version(void)

The version of the library that runs: 10000 * major + 100 * minor + patch.
""",
    "flashattn_version_string": """\
const char *flashattn_version_string(void)

The same as text: "0.1.0".
""",
    "flashattn_build_info": """\
const char *flashattn_build_info(void)

One line: version, compiler, kernel families and instruction sets in this build.
""",
    "flashattn_status_name": """\
const char *flashattn_status_name(int32_t status)

The name of an enum flashattn_status, "FLASHATTN_OK"; "unknown status" for any other number.
""",
    "flashattn_last_error": """\
const char *flashattn_last_error(int32_t *reason, const char **field)

The sentence of the last call of this thread that failed; "" when none did. Successful calls
leave it alone. It lives until the next call of this thread fails, and so does the field.
  reason   out, may be NULL: enum flashattn_reason.
  field    out, may be NULL: the structure member it is about, "dim_qk", "inputs.q.stride_seq";
           "" when there is none.
""",
    "flashattn_set_log": """\
int32_t flashattn_set_log(int32_t level, flashattn_log_fn callback, void *user)

Sends log lines to a callback, for the whole process.
  level      enum flashattn_log_level.
  callback   may be NULL: off.
  user       handed to the callback, may be NULL.
INVALID_ARGUMENT: unknown level.
""",
    "flashattn_device_count": """\
int32_t flashattn_device_count(int32_t device, int32_t *count)

How many devices of a kind there are. 0 where the build or the machine has none.
  device   enum flashattn_device.
  count    out.
INVALID_ARGUMENT: unknown kind, NULL.
""",
    "flashattn_device_info": """\
int32_t flashattn_device_info(int32_t device, int32_t index,
    flashattn_device_properties *properties)

Describes a device.
  device       enum flashattn_device.
  index        from 0.
  properties   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION; UNSUPPORTED: NO_CUDA_BUILD, NO_DEVICE; DEVICE.
""",
    "flashattn_desc_init": """\
int32_t flashattn_desc_init(flashattn_desc *desc, uint32_t struct_size)

Zeroes a descriptor and sets its struct_size.
  desc          out.
  struct_size   sizeof(flashattn_desc) as the caller knows it, 4 to 4096.
INVALID_ARGUMENT: NULL, a size out of that range.
""",
    "flashattn_check": """\
int32_t flashattn_check(const flashattn_desc *desc)

Whether flashattn_plan_create would succeed; if not, flashattn_last_error says why. Makes a plan
and frees it.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
""",
    "flashattn_plan_create": """\
int32_t flashattn_plan_create(const flashattn_desc *desc, flashattn_plan **plan)

Checks the descriptor, chooses the kernels and does everything that is slow. The choice depends
on the descriptor, the device and the library's version only.
  desc   may be freed afterwards.
  plan   out: to be freed by flashattn_plan_destroy. Untouched on failure.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
""",
    "flashattn_plan_destroy": """\
void flashattn_plan_destroy(flashattn_plan *plan)

Frees a plan; NULL is fine. Work already enqueued on a stream is not disturbed.
""",
    "flashattn_plan_info": """\
int32_t flashattn_plan_info(const flashattn_plan *plan, uint32_t op, const flashattn_shape *shape,
    flashattn_plan_properties *properties)

Says which kernel an operation uses and what it costs.
  op           one enum flashattn_op of the plan.
  shape        may be NULL: the promised maxima; what depends on a maximum that was not promised
               is then 0.
  properties   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION.
""",
    "flashattn_workspace_size": """\
int32_t flashattn_workspace_size(const flashattn_plan *plan, uint32_t op,
    const flashattn_shape *shape, int64_t *bytes)

Bytes of workspace that an operation needs: linear in the sequence length, never smaller for a
larger shape, known before any pointer exists. Need not be aligned or cleared.
  op      one enum flashattn_op of the plan.
  shape   may be NULL: enough for every call within the promised maxima.
  bytes   out; 0 is possible.
INVALID_ARGUMENT: also when shape is NULL and a maximum that matters was not promised.
""",
    "flashattn_forward": """\
int32_t flashattn_forward(const flashattn_plan *plan, const flashattn_forward_args *args,
    void *workspace, int64_t workspace_bytes, void *stream)

For each sequence, head and query, with the masks and the sequence's off of enum flashattn_mask:
    s    = scale * q_i . k_j ;  softcap: s = softcap * tanh(s / softcap)
    s   -= slope_h * |i + off - j| ;  s += bias[b, h, i, j]
    lse  = ln(sum over visible j of exp(s) [+ exp(sink_h)])
    o_i  = sum over visible j of keep(i, j) / (1 - dropout) * exp(s - lse) * v_j
(Dao et al. 2022, Dao 2023). Scores, softmax and sums are fp32. Results do not depend on the
magnitude or order of scores and biases, up to FLT_MAX, beyond the rounding of a score itself. A
row that sees one key only is that key's value.
  workspace         device memory, exclusive to this call until it is done. May be NULL when 0
                    bytes are needed.
  workspace_bytes   at least flashattn_workspace_size for this shape.
""",
    "flashattn_backward": """\
int32_t flashattn_backward(const flashattn_plan *plan, const flashattn_backward_args *args,
    void *workspace, int64_t workspace_bytes, void *stream)

The gradients, with the scores recomputed from lse (Dao et al. 2022, algorithm 4):
    D_i  = dout_i . o_i - dlse_i ;  P = exp(s - lse) ;  dP = keep / (1 - dropout) * dout v^T
    dS   = P * (dP - D) ;  dbias = dS ;  dsink_h = - sum over b, i of exp(sink_h - lse_i) * D_i
    dv_j = sum over i of keep / (1 - dropout) * P dout_i
    dq, dk from dS through softcap and scale
dk and dv of a KV head sum over its query heads. All rows within a sequence's length are written.
For a part of a larger attention, give the o and lse that flashattn_merge wrote. An fp32 lse
leaves a weight a relative error of up to |lse| * 2^-24: where |lse| is 1024 or more, the largest
score and the sum of the weights beside it are computed again instead, unless lse counts keys that
the call does not see; above 2^20 no lse can tell that.
""",
    "flashattn_merge": """\
int32_t flashattn_merge(const flashattn_plan *plan, const flashattn_merge_args *args,
    void *stream)

Merges partial results over disjoint sets of keys into the whole: lse = ln(sum of exp(lse_p)),
o = sum of exp(lse_p - lse) o_p; parts with lse = -inf count nothing. For ring or cascade
attention. A sink must be part of one partial result only. Needs no workspace; the plan gives
device, heads_q, dim_v, dtype_o and whether queries are VARLEN. o and lse may be those of a part
with the same strides and type. Rows are merged whatever lens says: give the parts defined
contents.
""",
    "flashattn_dropout_mask": """\
int32_t flashattn_dropout_mask(const flashattn_plan *plan, const flashattn_forward_args *args,
    uint8_t *keep, void *stream)

Writes which weights the plan's dropout keeps: 1 = kept, 0 = dropped. The numbers depend on
(seed, offset, b, h, i, j) only, not on device, tile or layout; i and j count from the start of a
sequence. Philox4x32-10 (Salmon et al. 2011) with key (seed low, seed high ^ offset high) and
counter ((j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, b * heads_q + h, offset low); its
word ((j >> 3) & 1) * 2 + ((i >> 3) & 1), low half for even j, high half for odd j, is u; kept
iff u >= round(65536 * dropout).
  args   only shape and the rng fields are read.
  keep   out, device memory: (batch, heads_q, seqlen_q, seqlen_kv) bytes.
""",
}
