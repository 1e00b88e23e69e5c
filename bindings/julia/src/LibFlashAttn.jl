# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""
The C header, name by name: constants, structures, functions. Structures have keyword constructors
whose defaults are zero, and `struct_size` set. Functions return what C returns; where a pointer to
a structure or number is wanted, a `Ref` or an `Array` does, and `C_NULL` for NULL.
"""
module LibFlashAttn

# The name inside the file. FlashAttention opens the file first, from wherever it lies; this name
# then means the library that is open already.
const lib = "libflashattn.so.0"

const HEADER_VERSION = 100

# enum flashattn_status
# What a call says of itself. Stored and returned as int32_t.
const FLASHATTN_OK = Int32(0)
"A field, pointer or size that no library of this version could honour on any device."
const FLASHATTN_ERROR_INVALID_ARGUMENT = Int32(1)
"A meaningful request that no kernel family of this build honours on this device."
const FLASHATTN_ERROR_UNSUPPORTED = Int32(2)
"The workspace is smaller than flashattn_workspace_size says."
const FLASHATTN_ERROR_WORKSPACE = Int32(3)
"Host memory ran out."
const FLASHATTN_ERROR_OUT_OF_MEMORY = Int32(4)
"The device or its driver reported an error, or the wrong device is current."
const FLASHATTN_ERROR_DEVICE = Int32(5)
"struct_size is zero, or larger than known with a part that is not zero: a newer header."
const FLASHATTN_ERROR_VERSION = Int32(6)
"A fault of the library itself. Please report it with the sentence."
const FLASHATTN_ERROR_INTERNAL = Int32(7)

# enum flashattn_reason
# Why a request was refused: the second half of flashattn_last_error. Stored as int32_t.
const FLASHATTN_REASON_NONE = Int32(0)
"The library was built without CUDA."
const FLASHATTN_REASON_NO_CUDA_BUILD = Int32(1)
"No such device on this machine."
const FLASHATTN_REASON_NO_DEVICE = Int32(2)
const FLASHATTN_REASON_DRIVER_TOO_OLD = Int32(3)
"The GPU is older than the kernels need."
const FLASHATTN_REASON_ARCH = Int32(4)
const FLASHATTN_REASON_DTYPE = Int32(5)
"dtype and dtype_o, or dtype and bias_dtype, do not go together."
const FLASHATTN_REASON_DTYPE_MIX = Int32(6)
const FLASHATTN_REASON_HEAD_DIM_MULTIPLE = Int32(7)
const FLASHATTN_REASON_HEAD_DIM_MAX = Int32(8)
const FLASHATTN_REASON_HEAD_DIM_PAIR = Int32(9)
"heads_q is no multiple of heads_kv."
const FLASHATTN_REASON_HEAD_RATIO = Int32(10)
const FLASHATTN_REASON_LAYOUT = Int32(11)
const FLASHATTN_REASON_PAGE_SIZE = Int32(12)
const FLASHATTN_REASON_MASK_COMBINATION = Int32(13)
const FLASHATTN_REASON_BIAS = Int32(14)
const FLASHATTN_REASON_DROPOUT = Int32(15)
const FLASHATTN_REASON_SINK = Int32(16)
const FLASHATTN_REASON_SOFTCAP = Int32(17)
const FLASHATTN_REASON_DETERMINISM = Int32(18)
const FLASHATTN_REASON_WORKSPACE_LIMIT = Int32(19)
const FLASHATTN_REASON_SHARED_MEMORY = Int32(20)
const FLASHATTN_REASON_CPU_ISA = Int32(21)
"The kernel family was switched off when the library was built."
const FLASHATTN_REASON_NOT_IN_THIS_BUILD = Int32(22)
"The plan was not made for this operation: see flashattn_desc.ops."
const FLASHATTN_REASON_OP = Int32(23)
"A required pointer is NULL, or one that the plan does not use is not."
const FLASHATTN_REASON_NULL_POINTER = Int32(24)
const FLASHATTN_REASON_MISALIGNED = Int32(25)
const FLASHATTN_REASON_OVERLAP = Int32(26)
"A size is zero, negative, past a promised maximum, or overflows."
const FLASHATTN_REASON_SIZE = Int32(27)
const FLASHATTN_REASON_STRIDE = Int32(28)
"An enumerator or bit this library does not know, or a value outside its range."
const FLASHATTN_REASON_VALUE = Int32(29)
const FLASHATTN_REASON_RESERVED = Int32(30)
const FLASHATTN_REASON_STRUCT_SIZE = Int32(31)
"cu_seqlens, lens or a page table hold an impossible value (CPU only: read there)."
const FLASHATTN_REASON_LENGTHS = Int32(32)
const FLASHATTN_REASON_STREAM = Int32(33)

# enum flashattn_device
const FLASHATTN_DEVICE_CPU = Int32(0)
const FLASHATTN_DEVICE_CUDA = Int32(1)

# enum flashattn_op
# Operations, as bits.
const FLASHATTN_OP_FORWARD = UInt32(1)
const FLASHATTN_OP_BACKWARD = UInt32(2)

# enum flashattn_dtype
"Not set: the field's default."
const FLASHATTN_DTYPE_DEFAULT = Int32(0)
const FLASHATTN_DTYPE_F32 = Int32(1)
const FLASHATTN_DTYPE_F16 = Int32(2)
const FLASHATTN_DTYPE_BF16 = Int32(3)
"8-bit float, 4 exponent bits, no infinity (OCP E4M3)."
const FLASHATTN_DTYPE_F8E4M3 = Int32(4)
"A byte: a boolean mask, 0 = hidden, anything else = visible."
const FLASHATTN_DTYPE_U8 = Int32(5)

# enum flashattn_layout
# How sequences lie in memory, as bits. None: dense (batch, seq, head, dim).
"Q, O and their gradients are (total_q, head, dim); cu_seqlens_q says where sequences start."
const FLASHATTN_LAYOUT_VARLEN_Q = UInt32(1)
"K, V and their gradients are (total_kv, head, dim); cu_seqlens_kv says where they start."
const FLASHATTN_LAYOUT_VARLEN_KV = UInt32(2)
"""
K and V are pools of pages (page, page_size, head, dim); page_table says which. Forward only,
not together with VARLEN_KV.
"""
const FLASHATTN_LAYOUT_PAGED_KV = UInt32(4)

# enum flashattn_mask
# Which keys a query sees, as bits: all must agree. With Sq, Sk the lengths of the sequence and
# off = Sk - Sq (TOP_LEFT: 0), query i sees key j when 0 <= j < Sk and
"j <= i + off"
const FLASHATTN_MASK_CAUSAL = UInt32(1)
"i + off - window_left <= j <= i + off + window_right; a side of -1 is open"
const FLASHATTN_MASK_WINDOW = UInt32(2)
"floor((i + off) / chunk) == floor(j / chunk)"
const FLASHATTN_MASK_CHUNK = UInt32(4)
"""
Aligns i and j at the start of the sequence instead of at its end, for the masks above and
for ALiBi.
"""
const FLASHATTN_MASK_TOP_LEFT = UInt32(8)
"block_mask[b, h, i / block_q, j / block_kv] != 0"
const FLASHATTN_MASK_BLOCKS = UInt32(16)

# enum flashattn_bias
# What is added to the scores, as bits.
"- alibi_slopes[h] * |i + off - j|  (Press et al. 2022)"
const FLASHATTN_BIAS_ALIBI = UInt32(1)
"+ bias[b, h, i, j]; with bias_dtype U8 a boolean mask."
const FLASHATTN_BIAS_DENSE = UInt32(2)

# enum flashattn_feature
# Further inputs and outputs, as bits.
"Forward writes lse."
const FLASHATTN_FEATURE_LSE = UInt32(1)
"A learned logit per query head that takes part in the softmax and has no value vector."
const FLASHATTN_FEATURE_SINK = UInt32(2)
"Backward adds the gradient that arrives at lse."
const FLASHATTN_FEATURE_DLSE = UInt32(4)
"Backward writes the gradient of the dense bias."
const FLASHATTN_FEATURE_DBIAS = UInt32(8)
"Backward writes the gradient of the sink."
const FLASHATTN_FEATURE_DSINK = UInt32(16)

# enum flashattn_determinism
# Which results must repeat bit for bit. Each level includes the one before.
"Whatever is fastest. On the CPU: always BATCH_INVARIANT."
const FLASHATTN_DETERMINISM_DEFAULT = Int32(0)
"The same call on the same device gives the same bits."
const FLASHATTN_DETERMINISM_RUN_TO_RUN = Int32(1)
"A sequence's bits do not depend on what else is in the batch."
const FLASHATTN_DETERMINISM_BATCH_INVARIANT = Int32(2)

# enum flashattn_log_level
const FLASHATTN_LOG_OFF = Int32(0)
"The sentence of every call that fails."
const FLASHATTN_LOG_ERROR = Int32(1)
"Also: the kernel that each plan chose, and why."
const FLASHATTN_LOG_INFO = Int32(2)
"Also: every kernel family that refused, with its reason."
const FLASHATTN_LOG_DEBUG = Int32(3)

# The names of each enumeration, without its prefix.
const flashattn_status = (OK = FLASHATTN_OK, ERROR_INVALID_ARGUMENT =
    FLASHATTN_ERROR_INVALID_ARGUMENT, ERROR_UNSUPPORTED = FLASHATTN_ERROR_UNSUPPORTED,
    ERROR_WORKSPACE = FLASHATTN_ERROR_WORKSPACE, ERROR_OUT_OF_MEMORY =
    FLASHATTN_ERROR_OUT_OF_MEMORY, ERROR_DEVICE = FLASHATTN_ERROR_DEVICE, ERROR_VERSION =
    FLASHATTN_ERROR_VERSION, ERROR_INTERNAL = FLASHATTN_ERROR_INTERNAL,)
const flashattn_reason = (NONE = FLASHATTN_REASON_NONE, NO_CUDA_BUILD =
    FLASHATTN_REASON_NO_CUDA_BUILD, NO_DEVICE = FLASHATTN_REASON_NO_DEVICE, DRIVER_TOO_OLD =
    FLASHATTN_REASON_DRIVER_TOO_OLD, ARCH = FLASHATTN_REASON_ARCH, DTYPE =
    FLASHATTN_REASON_DTYPE, DTYPE_MIX = FLASHATTN_REASON_DTYPE_MIX, HEAD_DIM_MULTIPLE =
    FLASHATTN_REASON_HEAD_DIM_MULTIPLE, HEAD_DIM_MAX = FLASHATTN_REASON_HEAD_DIM_MAX,
    HEAD_DIM_PAIR = FLASHATTN_REASON_HEAD_DIM_PAIR, HEAD_RATIO = FLASHATTN_REASON_HEAD_RATIO,
    LAYOUT = FLASHATTN_REASON_LAYOUT, PAGE_SIZE = FLASHATTN_REASON_PAGE_SIZE, MASK_COMBINATION =
    FLASHATTN_REASON_MASK_COMBINATION, BIAS = FLASHATTN_REASON_BIAS, DROPOUT =
    FLASHATTN_REASON_DROPOUT, SINK = FLASHATTN_REASON_SINK, SOFTCAP = FLASHATTN_REASON_SOFTCAP,
    DETERMINISM = FLASHATTN_REASON_DETERMINISM, WORKSPACE_LIMIT =
    FLASHATTN_REASON_WORKSPACE_LIMIT, SHARED_MEMORY = FLASHATTN_REASON_SHARED_MEMORY, CPU_ISA =
    FLASHATTN_REASON_CPU_ISA, NOT_IN_THIS_BUILD = FLASHATTN_REASON_NOT_IN_THIS_BUILD, OP =
    FLASHATTN_REASON_OP, NULL_POINTER = FLASHATTN_REASON_NULL_POINTER, MISALIGNED =
    FLASHATTN_REASON_MISALIGNED, OVERLAP = FLASHATTN_REASON_OVERLAP, SIZE =
    FLASHATTN_REASON_SIZE, STRIDE = FLASHATTN_REASON_STRIDE, VALUE = FLASHATTN_REASON_VALUE,
    RESERVED = FLASHATTN_REASON_RESERVED, STRUCT_SIZE = FLASHATTN_REASON_STRUCT_SIZE, LENGTHS =
    FLASHATTN_REASON_LENGTHS, STREAM = FLASHATTN_REASON_STREAM,)
const flashattn_device = (CPU = FLASHATTN_DEVICE_CPU, CUDA = FLASHATTN_DEVICE_CUDA,)
const flashattn_op = (FORWARD = FLASHATTN_OP_FORWARD, BACKWARD = FLASHATTN_OP_BACKWARD,)
const flashattn_dtype = (DEFAULT = FLASHATTN_DTYPE_DEFAULT, F32 = FLASHATTN_DTYPE_F32, F16 =
    FLASHATTN_DTYPE_F16, BF16 = FLASHATTN_DTYPE_BF16, F8E4M3 = FLASHATTN_DTYPE_F8E4M3, U8 =
    FLASHATTN_DTYPE_U8,)
const flashattn_layout = (VARLEN_Q = FLASHATTN_LAYOUT_VARLEN_Q, VARLEN_KV =
    FLASHATTN_LAYOUT_VARLEN_KV, PAGED_KV = FLASHATTN_LAYOUT_PAGED_KV,)
const flashattn_mask = (CAUSAL = FLASHATTN_MASK_CAUSAL, WINDOW = FLASHATTN_MASK_WINDOW, CHUNK =
    FLASHATTN_MASK_CHUNK, TOP_LEFT = FLASHATTN_MASK_TOP_LEFT, BLOCKS = FLASHATTN_MASK_BLOCKS,)
const flashattn_bias = (ALIBI = FLASHATTN_BIAS_ALIBI, DENSE = FLASHATTN_BIAS_DENSE,)
const flashattn_feature = (LSE = FLASHATTN_FEATURE_LSE, SINK = FLASHATTN_FEATURE_SINK, DLSE =
    FLASHATTN_FEATURE_DLSE, DBIAS = FLASHATTN_FEATURE_DBIAS, DSINK = FLASHATTN_FEATURE_DSINK,)
const flashattn_determinism = (DEFAULT = FLASHATTN_DETERMINISM_DEFAULT, RUN_TO_RUN =
    FLASHATTN_DETERMINISM_RUN_TO_RUN, BATCH_INVARIANT = FLASHATTN_DETERMINISM_BATCH_INVARIANT,)
const flashattn_log_level = (OFF = FLASHATTN_LOG_OFF, ERROR = FLASHATTN_LOG_ERROR, INFO =
    FLASHATTN_LOG_INFO, DEBUG = FLASHATTN_LOG_DEBUG,)

mutable struct flashattn_plan end

"""
    flashattn_log_fn(user::Ptr{Cvoid}, level::Int32, message::Cstring)::Cvoid

A `@cfunction` of this type. Receives a line of the log. Called from any thread that is inside a library call; must not call
the library. message lives for the call only.
"""
const flashattn_log_fn = Ptr{Cvoid}

"""
    flashattn_desc(; fields...)

What is computed. Describes a whole family of calls: lengths come later, with each call.
"""
Base.@kwdef struct flashattn_desc
    "Required: sizeof(flashattn_desc)."
    struct_size::UInt32 = 184
    "enum flashattn_device. 0: the CPU."
    device::Int32 = 0
    "Which of its kind, from 0. CUDA: the runtime's ordinal."
    device_index::Int32 = 0
    "enum flashattn_op bits. 0: forward only."
    ops::UInt32 = 0
    "Required: enum flashattn_dtype of q, k, v and their gradients."
    dtype::Int32 = 0
    "Of o and dout. 0: as dtype. F32 is possible beside 16-bit inputs."
    dtype_o::Int32 = 0
    "Required: query heads, >= 1."
    heads_q::Int32 = 0
    """
    Key and value heads; heads_q must be a multiple. 0: as heads_q. Query head h reads KV head
    h / (heads_q / heads_kv).
    """
    heads_kv::Int32 = 0
    "Required: elements of a query and a key, >= 1."
    dim_qk::Int32 = 0
    "Elements of a value. 0: as dim_qk."
    dim_v::Int32 = 0
    "enum flashattn_layout bits."
    layout::UInt32 = 0
    "Tokens a page, >= 1. Only with PAGED_KV, 0 otherwise."
    page_size::Int32 = 0
    "enum flashattn_mask bits."
    mask::UInt32 = 0
    "Keys visible to the left and right of the diagonal; -1: open. Only with WINDOW."
    window_left::Int32 = 0
    window_right::Int32 = 0
    "Tokens a chunk, >= 1. Only with CHUNK."
    chunk::Int32 = 0
    "Queries and keys a block of the block mask, >= 1. Only with BLOCKS."
    block_q::Int32 = 0
    block_kv::Int32 = 0
    "enum flashattn_bias bits."
    bias::UInt32 = 0
    "Of the dense bias: F32, F16, BF16 or U8. 0: as dtype. Only with DENSE."
    bias_dtype::Int32 = 0
    "enum flashattn_feature bits."
    features::UInt32 = 0
    "enum flashattn_determinism."
    determinism::Int32 = 0
    "Factor of the scores. 0: 1 / sqrt(dim_qk). Finite."
    scale::Cfloat = 0
    "Scores become softcap * tanh(score / softcap). 0: off. Finite, > 0."
    softcap::Cfloat = 0
    "Probability with which a weight is dropped, [0, 1), in steps of 1/65536. 0: off."
    dropout::Cfloat = 0
    "Parts into which the keys of a short query are split. 0: the library chooses. 1: never."
    splits::Int32 = 0
    """
    Promises: no call will pass them. 0: not promised. They let flashattn_workspace_size answer
    for all calls at once, and help to choose a kernel.
    """
    max_batch::Int32 = 0
    max_seqlen_q::Int32 = 0
    max_seqlen_kv::Int32 = 0
    "GPU: streaming multiprocessors to use at the most. 0: all."
    sm_limit::Int32 = 0
    "CPU: threads to use at the most. 0: all that OpenMP offers. 1: the caller's only."
    threads::Int32 = 0
    reserved0::Int32 = 0
    "Promises, as above, for VARLEN layouts: tokens of all sequences together."
    max_total_q::Int64 = 0
    max_total_kv::Int64 = 0
    "Refuse the plan when the promised maxima need more bytes of workspace. 0: no limit."
    workspace_limit::Int64 = 0
    reserved::NTuple{4,Int64} = (0, 0, 0, 0,)
end

"""
    flashattn_shape(; fields...)

The sizes of one call, known on the host. Where lengths lie on the device, upper bounds.
"""
Base.@kwdef struct flashattn_shape
    "Sequences. 0: nothing to do."
    batch::Int32 = 0
    "Queries of the longest sequence; dense: of every sequence, unless lens_q says less."
    seqlen_q::Int32 = 0
    "Keys, likewise."
    seqlen_kv::Int32 = 0
    reserved::Int32 = 0
    "VARLEN_Q: the rows of q, all sequences together. 0 otherwise."
    total_q::Int64 = 0
    "VARLEN_KV: the rows of k and v. 0 otherwise."
    total_kv::Int64 = 0
end

"""
    flashattn_tensor(; fields...)

Where an array with indices (b, i, h, c) lies. The elements of a head are contiguous.
"""
Base.@kwdef struct flashattn_tensor
    "Device memory, aligned to its element. May be NULL when the array has no element."
    data::Ptr{Cvoid} = C_NULL
    """
    Elements from one sequence, head, token to the next. All three zero: packed, (batch, seq, head,
    dim) without gaps. Else they are taken as they stand: a zero repeats (inputs only), negative
    ones are refused. VARLEN: stride_batch must be 0. PAGED_KV: stride_batch goes from page to
    page, stride_seq from token to token inside a page.
    """
    stride_batch::Int64 = 0
    stride_head::Int64 = 0
    stride_seq::Int64 = 0
end

"""
    flashattn_inputs(; fields...)

```text
The inputs that forward and backward share. Pointers are to device memory and must be NULL where
the plan has no use for them, unless \"optional\" is said.
```
"""
Base.@kwdef struct flashattn_inputs
    "(batch, seqlen_q, heads_q, dim_qk), or VARLEN_Q."
    q::flashattn_tensor = flashattn_tensor()
    "(batch, seqlen_kv, heads_kv, dim_qk), or VARLEN_KV, or PAGED_KV."
    k::flashattn_tensor = flashattn_tensor()
    "(batch, seqlen_kv, heads_kv, dim_v), likewise."
    v::flashattn_tensor = flashattn_tensor()
    "(batch + 1): sequence b holds rows [cu[b], cu[b + 1]). Required with VARLEN_Q / VARLEN_KV."
    cu_seqlens_q::Ptr{Int32} = C_NULL
    cu_seqlens_kv::Ptr{Int32} = C_NULL
    "(batch), optional with any layout: tokens in use of each sequence, at most its capacity."
    lens_q::Ptr{Int32} = C_NULL
    lens_kv::Ptr{Int32} = C_NULL
    "(batch, pages of a sequence): page numbers. Required with PAGED_KV."
    page_table::Ptr{Int32} = C_NULL
    "Elements from row to row of page_table. 0: ceil(seqlen_kv / page_size)."
    page_table_stride::Int64 = 0
    "Pages in the pool. Required with PAGED_KV."
    pages::Int64 = 0
    "bias_dtype (batch, heads_q, seqlen_q, seqlen_kv), keys contiguous. Required with DENSE."
    bias::Ptr{Cvoid} = C_NULL
    "Elements from one to the next. 0: the same for all."
    bias_stride_batch::Int64 = 0
    bias_stride_head::Int64 = 0
    bias_stride_row::Int64 = 0
    "(heads_q), or (batch, heads_q) with a stride. Required with ALIBI."
    alibi_slopes::Ptr{Cfloat} = C_NULL
    "Elements from sequence to sequence. 0: the same for all."
    alibi_stride_batch::Int64 = 0
    "(heads_q), natural logits. Required with SINK."
    sink::Ptr{Cfloat} = C_NULL
    """
    (batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)) bytes, keys contiguous.
    Required with BLOCKS.
    """
    block_mask::Ptr{UInt8} = C_NULL
    "Bytes from one to the next. 0: the same for all; rows: 0 = packed."
    block_mask_stride_batch::Int64 = 0
    block_mask_stride_head::Int64 = 0
    block_mask_stride_row::Int64 = 0
    "One float each, factors of q, k, v. F8E4M3 only, optional: 1."
    descale_q::Ptr{Cfloat} = C_NULL
    descale_k::Ptr{Cfloat} = C_NULL
    descale_v::Ptr{Cfloat} = C_NULL
    "Random numbers of the dropout: see flashattn_dropout_mask."
    rng_seed::UInt64 = 0
    rng_offset::UInt64 = 0
    """
    Optional: {seed, offset} in device memory, to which the two above are added. For CUDA graphs,
    which can thus be replayed with new numbers.
    """
    rng_device::Ptr{UInt64} = C_NULL
    reserved::NTuple{4,Int64} = (0, 0, 0, 0,)
end

"    flashattn_forward_args(; fields...)"
Base.@kwdef struct flashattn_forward_args
    "Required: sizeof(flashattn_forward_args)."
    struct_size::UInt32 = 432
    reserved0::UInt32 = 0
    shape::flashattn_shape = flashattn_shape()
    inputs::flashattn_inputs = flashattn_inputs()
    "Out: dtype_o (batch, seqlen_q, heads_q, dim_v), or VARLEN_Q."
    o::flashattn_tensor = flashattn_tensor()
    """
    Out: (batch, heads_q, seqlen_q), or VARLEN_Q: (heads_q, total_q). Natural logarithm.
    Required with LSE.
    """
    lse::Ptr{Cfloat} = C_NULL
    reserved::NTuple{4,Int64} = (0, 0, 0, 0,)
end

"    flashattn_backward_args(; fields...)"
Base.@kwdef struct flashattn_backward_args
    "Required: sizeof(flashattn_backward_args)."
    struct_size::UInt32 = 608
    reserved0::UInt32 = 0
    shape::flashattn_shape = flashattn_shape()
    "The same as in the forward call."
    inputs::flashattn_inputs = flashattn_inputs()
    "What forward wrote."
    o::flashattn_tensor = flashattn_tensor()
    "The gradient that arrives at o: dtype_o, the shape of o."
    dout::flashattn_tensor = flashattn_tensor()
    "What forward wrote. Required."
    lse::Ptr{Cfloat} = C_NULL
    "The gradient that arrives at lse, laid out like it. Required with DLSE."
    dlse::Ptr{Cfloat} = C_NULL
    "Out: dtype, the shapes of q, k, v. Written, not added to."
    dq::flashattn_tensor = flashattn_tensor()
    dk::flashattn_tensor = flashattn_tensor()
    dv::flashattn_tensor = flashattn_tensor()
    "Out: the gradient of the dense bias. Required with DBIAS."
    dbias::Ptr{Cfloat} = C_NULL
    "Elements from one to the next. 0: summed over that index."
    dbias_stride_batch::Int64 = 0
    dbias_stride_head::Int64 = 0
    dbias_stride_row::Int64 = 0
    "Out: (heads_q), the gradient of the sink. Required with DSINK."
    dsink::Ptr{Cfloat} = C_NULL
    reserved::NTuple{4,Int64} = (0, 0, 0, 0,)
end

"    flashattn_merge_args(; fields...)"
Base.@kwdef struct flashattn_merge_args
    "Required: sizeof(flashattn_merge_args)."
    struct_size::UInt32 = 136
    "Required: how many partial results, >= 1."
    parts::Int32 = 0
    "batch and seqlen_q, or with VARLEN_Q total_q, are read."
    shape::flashattn_shape = flashattn_shape()
    "Host array (parts) of arrays shaped like o."
    part_o::Ptr{flashattn_tensor} = C_NULL
    "Host array (parts) of pointers to device memory, each laid out like lse."
    part_lse::Ptr{Ptr{Cfloat}} = C_NULL
    "Of the partial o: dtype_o of the plan or F32. 0: dtype_o."
    part_dtype::Int32 = 0
    reserved0::Int32 = 0
    "Out: dtype_o of the plan."
    o::flashattn_tensor = flashattn_tensor()
    "Out, optional."
    lse::Ptr{Cfloat} = C_NULL
    reserved::NTuple{4,Int64} = (0, 0, 0, 0,)
end

"""
    flashattn_device_properties(; fields...)

A device, as flashattn_device_info describes it.
"""
Base.@kwdef struct flashattn_device_properties
    "Required: sizeof(flashattn_device_properties)."
    struct_size::UInt32 = 40
    "CPU: threads that a plan with threads = 0 uses. GPU: streaming multiprocessors."
    units::Int32 = 0
    "\"AMD EPYC 9354\", \"NVIDIA H200\"."
    name::Cstring = Cstring(C_NULL)
    "The best kernels this build has for it: \"avx512_bf16\", \"sm90\"."
    isa::Cstring = Cstring(C_NULL)
    "GPU: compute capability, 90 for 9.0. CPU: 0."
    compute_capability::Int32 = 0
    "Bytes of fast memory next to a unit: shared memory a block may use; L2 cache of a core."
    local_memory::Int32 = 0
    "Bytes of memory."
    memory::Int64 = 0
end

"""
    flashattn_plan_properties(; fields...)

What a plan will do, as flashattn_plan_info describes it.
"""
Base.@kwdef struct flashattn_plan_properties
    "Required: sizeof(flashattn_plan_properties)."
    struct_size::UInt32 = 88
    "Queries and keys of a tile."
    tile_q::Int32 = 0
    tile_kv::Int32 = 0
    "Tiles in flight; 1: none ahead."
    stages::Int32 = 0
    "CPU: threads at the most. GPU: threads a block."
    threads::Int32 = 0
    "GPU: registers a thread. CPU: 0."
    registers::Int32 = 0
    "Bytes of fast memory: shared memory a block; scratch of a CPU thread."
    local_memory::Int32 = 0
    "Parts into which the longest sequence's keys are split for this shape."
    splits::Int32 = 0
    "\"cpu\", \"sm90\"."
    family::Cstring = Cstring(C_NULL)
    "The kernel's name. Lives as long as the plan, as do the next two."
    kernel::Cstring = Cstring(C_NULL)
    "Instructions it is made of: \"avx512_bf16\"."
    isa::Cstring = Cstring(C_NULL)
    "One sentence: why this kernel."
    why::Cstring = Cstring(C_NULL)
    """
    For the shape asked about: arithmetic of the visible pairs, 2 for a multiply-add: 2 (dim_qk +
    dim_v) a pair forward, 2.5 times that backward. Block masks, lens and bias count as visible.
    """
    flops::Int64 = 0
    "Least bytes to move: every input read once, every output written once."
    bytes::Int64 = 0
    "flashattn_workspace_size."
    workspace::Int64 = 0
end

"""
    flashattn_version()::Int32

The version of the library that runs: 10000 * major + 100 * minor + patch.
"""
function flashattn_version()
    @ccall lib.flashattn_version()::Int32
end

"""
    flashattn_version_string()::Cstring

The same as text: \"0.1.0\".
"""
function flashattn_version_string()
    @ccall lib.flashattn_version_string()::Cstring
end

"""
    flashattn_build_info()::Cstring

One line: version, compiler, kernel families and instruction sets in this build.
"""
function flashattn_build_info()
    @ccall lib.flashattn_build_info()::Cstring
end

"""
    flashattn_status_name(status::Int32)::Cstring

The name of an enum flashattn_status, \"FLASHATTN_OK\"; \"unknown status\" for any other number.
"""
function flashattn_status_name(status)
    @ccall lib.flashattn_status_name(status::Int32)::Cstring
end

"""
    flashattn_last_error(reason::Ptr{Int32}, field::Ptr{Cstring})::Cstring

```text
The sentence of the last call of this thread that failed; \"\" when none did. Successful calls
leave it alone. It lives until the next call of this thread fails.
  reason   out, may be NULL: enum flashattn_reason.
  field    out, may be NULL: the structure member it is about, \"dim_qk\", \"inputs.q.stride_seq\"; \"\" when
           there is none.
```
"""
function flashattn_last_error(reason, field)
    @ccall lib.flashattn_last_error(reason::Ptr{Int32}, field::Ptr{Cstring})::Cstring
end

"""
    flashattn_set_log(level::Int32, fn::flashattn_log_fn, user::Ptr{Cvoid})::Int32

```text
Sends log lines to fn, for the whole process.
  level    enum flashattn_log_level.
  fn       may be NULL: off.
  user     handed to fn, may be NULL.
INVALID_ARGUMENT: unknown level.
```
"""
function flashattn_set_log(level, fn, user)
    @ccall lib.flashattn_set_log(level::Int32, fn::flashattn_log_fn, user::Ptr{Cvoid})::Int32
end

"""
    flashattn_device_count(device::Int32, count::Ptr{Int32})::Int32

```text
How many devices of a kind there are. 0 where the build or the machine has none.
  device   enum flashattn_device.
  count    out.
INVALID_ARGUMENT: unknown kind, NULL.
```
"""
function flashattn_device_count(device, count)
    @ccall lib.flashattn_device_count(device::Int32, count::Ptr{Int32})::Int32
end

"""
    flashattn_device_info(device::Int32, index::Int32, properties::Ptr{flashattn_device_properties})::Int32

```text
Describes a device.
  device       enum flashattn_device.
  index        from 0.
  properties   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION; UNSUPPORTED: NO_CUDA_BUILD, NO_DEVICE; DEVICE.
```
"""
function flashattn_device_info(device, index, properties)
    @ccall lib.flashattn_device_info(device::Int32, index::Int32,
        properties::Ptr{flashattn_device_properties})::Int32
end

"""
    flashattn_desc_init(desc::Ptr{flashattn_desc}, struct_size::UInt32)::Int32

```text
Zeroes a descriptor and sets its struct_size.
  desc          out.
  struct_size   sizeof(flashattn_desc) as the caller knows it, >= 4.
INVALID_ARGUMENT: NULL, too small.
```
"""
function flashattn_desc_init(desc, struct_size)
    @ccall lib.flashattn_desc_init(desc::Ptr{flashattn_desc}, struct_size::UInt32)::Int32
end

"""
    flashattn_check(desc::Ptr{flashattn_desc})::Int32

```text
Whether flashattn_plan_create would succeed; if not, flashattn_last_error says why.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE.
```
"""
function flashattn_check(desc)
    @ccall lib.flashattn_check(desc::Ptr{flashattn_desc})::Int32
end

"""
    flashattn_plan_create(desc::Ptr{flashattn_desc}, plan::Ptr{Ptr{flashattn_plan}})::Int32

```text
Checks the descriptor, chooses the kernels and does everything that is slow. The choice depends on
the descriptor, the device and the library's version only.
  desc   may be freed afterwards.
  plan   out: to be freed by flashattn_plan_destroy. Untouched on failure.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
```
"""
function flashattn_plan_create(desc, plan)
    @ccall lib.flashattn_plan_create(desc::Ptr{flashattn_desc}, plan::Ptr{Ptr{flashattn_plan}})::Int32
end

"""
    flashattn_plan_destroy(plan::Ptr{flashattn_plan})::Cvoid

Frees a plan; NULL is fine. Work already enqueued on a stream is not disturbed.
"""
function flashattn_plan_destroy(plan)
    @ccall lib.flashattn_plan_destroy(plan::Ptr{flashattn_plan})::Cvoid
end

"""
    flashattn_plan_info(plan::Ptr{flashattn_plan}, op::UInt32, shape::Ptr{flashattn_shape}, properties::Ptr{flashattn_plan_properties})::Int32

```text
Says which kernel an operation uses and what it costs.
  op           one enum flashattn_op of the plan.
  shape        may be NULL: the promised maxima; what depends on a maximum that was not promised
               is then 0.
  properties   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION.
```
"""
function flashattn_plan_info(plan, op, shape, properties)
    @ccall lib.flashattn_plan_info(plan::Ptr{flashattn_plan}, op::UInt32,
        shape::Ptr{flashattn_shape}, properties::Ptr{flashattn_plan_properties})::Int32
end

"""
    flashattn_workspace_size(plan::Ptr{flashattn_plan}, op::UInt32, shape::Ptr{flashattn_shape}, bytes::Ptr{Int64})::Int32

```text
Bytes of workspace that an operation needs: linear in the sequence length, never smaller for a
larger shape, known before any pointer exists. Need not be aligned or cleared.
  op      one enum flashattn_op of the plan.
  shape   may be NULL: enough for every call within the promised maxima.
  bytes   out; 0 is possible.
INVALID_ARGUMENT: also when shape is NULL and a maximum that matters was not promised.
```
"""
function flashattn_workspace_size(plan, op, shape, bytes)
    @ccall lib.flashattn_workspace_size(plan::Ptr{flashattn_plan}, op::UInt32,
        shape::Ptr{flashattn_shape}, bytes::Ptr{Int64})::Int32
end

"""
    flashattn_forward(plan::Ptr{flashattn_plan}, args::Ptr{flashattn_forward_args}, workspace::Ptr{Cvoid}, workspace_bytes::Int64, stream::Ptr{Cvoid})::Int32

```text
For each sequence, head and query, with the masks and the sequence's off of enum flashattn_mask:
    s    = scale * q_i . k_j ;  softcap: s = softcap * tanh(s / softcap)
    s   -= slope_h * |i + off - j| ;  s += bias[b, h, i, j]
    lse  = ln(sum over visible j of exp(s) [+ exp(sink_h)])
    o_i  = sum over visible j of keep(i, j) / (1 - dropout) * exp(s - lse) * v_j
(Dao et al. 2022, Dao 2023). Scores, softmax and sums are fp32.
  workspace         device memory, exclusive to this call until it is done. May be NULL when 0
                    bytes are needed.
  workspace_bytes   at least flashattn_workspace_size for this shape.
```
"""
function flashattn_forward(plan, args, workspace, workspace_bytes, stream)
    @ccall lib.flashattn_forward(plan::Ptr{flashattn_plan},
        args::Ptr{flashattn_forward_args}, workspace::Ptr{Cvoid}, workspace_bytes::Int64,
        stream::Ptr{Cvoid})::Int32
end

"""
    flashattn_backward(plan::Ptr{flashattn_plan}, args::Ptr{flashattn_backward_args}, workspace::Ptr{Cvoid}, workspace_bytes::Int64, stream::Ptr{Cvoid})::Int32

```text
The gradients, with the scores recomputed from lse (Dao et al. 2022, algorithm 4):
    D_i  = dout_i . o_i - dlse_i ;  P = exp(s - lse) ;  dP = keep / (1 - dropout) * dout v^T
    dS   = P * (dP - D) ;  dbias = dS ;  dsink_h = - sum over b, i of exp(sink_h - lse_i) * D_i
    dv_j = sum over i of keep / (1 - dropout) * P dout_i
    dq, dk from dS through softcap and scale
dk and dv of a KV head sum over its query heads. All rows within a sequence's length are written.
For a part of a larger attention, give the o and lse that flashattn_merge wrote.
```
"""
function flashattn_backward(plan, args, workspace, workspace_bytes, stream)
    @ccall lib.flashattn_backward(plan::Ptr{flashattn_plan},
        args::Ptr{flashattn_backward_args}, workspace::Ptr{Cvoid}, workspace_bytes::Int64,
        stream::Ptr{Cvoid})::Int32
end

"""
    flashattn_merge(plan::Ptr{flashattn_plan}, args::Ptr{flashattn_merge_args}, stream::Ptr{Cvoid})::Int32

```text
Merges partial results over disjoint sets of keys into the whole: lse = ln(sum of exp(lse_p)),
o = sum of exp(lse_p - lse) o_p; parts with lse = -inf count nothing. For ring or cascade
attention. A sink must be part of one partial result only. Needs no workspace; the plan gives
device, heads_q, dim_v, dtype_o and whether queries are VARLEN. o and lse may be those of a part
with the same strides and type. Rows are merged whatever lens says: give the parts defined
contents.
```
"""
function flashattn_merge(plan, args, stream)
    @ccall lib.flashattn_merge(plan::Ptr{flashattn_plan}, args::Ptr{flashattn_merge_args},
        stream::Ptr{Cvoid})::Int32
end

"""
    flashattn_dropout_mask(plan::Ptr{flashattn_plan}, args::Ptr{flashattn_forward_args}, keep::Ptr{UInt8}, stream::Ptr{Cvoid})::Int32

```text
Writes which weights the plan's dropout keeps: 1 = kept, 0 = dropped. The numbers depend on
(seed, offset, b, h, i, j) only, not on device, tile or layout; i and j count from the start of a
sequence. Philox4x32-10 (Salmon et al. 2011) with key (seed low, seed high ^ offset high) and
counter ((j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, b * heads_q + h, offset low); its
word ((j >> 3) & 1) * 2 + ((i >> 3) & 1), low half for even j, high half for odd j, is u; kept
iff u >= round(65536 * dropout).
  args   only shape and the rng fields are read.
  keep   out, device memory: (batch, heads_q, seqlen_q, seqlen_kv) bytes.
```
"""
function flashattn_dropout_mask(plan, args, keep, stream)
    @ccall lib.flashattn_dropout_mask(plan::Ptr{flashattn_plan},
        args::Ptr{flashattn_forward_args}, keep::Ptr{UInt8}, stream::Ptr{Cvoid})::Int32
end

# Structure, bytes, (field, offset, bytes)...
const LAYOUT = (
    (flashattn_desc, 184, (
        (:struct_size, 0, 4),
        (:device, 4, 4),
        (:device_index, 8, 4),
        (:ops, 12, 4),
        (:dtype, 16, 4),
        (:dtype_o, 20, 4),
        (:heads_q, 24, 4),
        (:heads_kv, 28, 4),
        (:dim_qk, 32, 4),
        (:dim_v, 36, 4),
        (:layout, 40, 4),
        (:page_size, 44, 4),
        (:mask, 48, 4),
        (:window_left, 52, 4),
        (:window_right, 56, 4),
        (:chunk, 60, 4),
        (:block_q, 64, 4),
        (:block_kv, 68, 4),
        (:bias, 72, 4),
        (:bias_dtype, 76, 4),
        (:features, 80, 4),
        (:determinism, 84, 4),
        (:scale, 88, 4),
        (:softcap, 92, 4),
        (:dropout, 96, 4),
        (:splits, 100, 4),
        (:max_batch, 104, 4),
        (:max_seqlen_q, 108, 4),
        (:max_seqlen_kv, 112, 4),
        (:sm_limit, 116, 4),
        (:threads, 120, 4),
        (:reserved0, 124, 4),
        (:max_total_q, 128, 8),
        (:max_total_kv, 136, 8),
        (:workspace_limit, 144, 8),
        (:reserved, 152, 32),
    )),
    (flashattn_shape, 32, (
        (:batch, 0, 4),
        (:seqlen_q, 4, 4),
        (:seqlen_kv, 8, 4),
        (:reserved, 12, 4),
        (:total_q, 16, 8),
        (:total_kv, 24, 8),
    )),
    (flashattn_tensor, 32, (
        (:data, 0, 8),
        (:stride_batch, 8, 8),
        (:stride_head, 16, 8),
        (:stride_seq, 24, 8),
    )),
    (flashattn_inputs, 320, (
        (:q, 0, 32),
        (:k, 32, 32),
        (:v, 64, 32),
        (:cu_seqlens_q, 96, 8),
        (:cu_seqlens_kv, 104, 8),
        (:lens_q, 112, 8),
        (:lens_kv, 120, 8),
        (:page_table, 128, 8),
        (:page_table_stride, 136, 8),
        (:pages, 144, 8),
        (:bias, 152, 8),
        (:bias_stride_batch, 160, 8),
        (:bias_stride_head, 168, 8),
        (:bias_stride_row, 176, 8),
        (:alibi_slopes, 184, 8),
        (:alibi_stride_batch, 192, 8),
        (:sink, 200, 8),
        (:block_mask, 208, 8),
        (:block_mask_stride_batch, 216, 8),
        (:block_mask_stride_head, 224, 8),
        (:block_mask_stride_row, 232, 8),
        (:descale_q, 240, 8),
        (:descale_k, 248, 8),
        (:descale_v, 256, 8),
        (:rng_seed, 264, 8),
        (:rng_offset, 272, 8),
        (:rng_device, 280, 8),
        (:reserved, 288, 32),
    )),
    (flashattn_forward_args, 432, (
        (:struct_size, 0, 4),
        (:reserved0, 4, 4),
        (:shape, 8, 32),
        (:inputs, 40, 320),
        (:o, 360, 32),
        (:lse, 392, 8),
        (:reserved, 400, 32),
    )),
    (flashattn_backward_args, 608, (
        (:struct_size, 0, 4),
        (:reserved0, 4, 4),
        (:shape, 8, 32),
        (:inputs, 40, 320),
        (:o, 360, 32),
        (:dout, 392, 32),
        (:lse, 424, 8),
        (:dlse, 432, 8),
        (:dq, 440, 32),
        (:dk, 472, 32),
        (:dv, 504, 32),
        (:dbias, 536, 8),
        (:dbias_stride_batch, 544, 8),
        (:dbias_stride_head, 552, 8),
        (:dbias_stride_row, 560, 8),
        (:dsink, 568, 8),
        (:reserved, 576, 32),
    )),
    (flashattn_merge_args, 136, (
        (:struct_size, 0, 4),
        (:parts, 4, 4),
        (:shape, 8, 32),
        (:part_o, 40, 8),
        (:part_lse, 48, 8),
        (:part_dtype, 56, 4),
        (:reserved0, 60, 4),
        (:o, 64, 32),
        (:lse, 96, 8),
        (:reserved, 104, 32),
    )),
    (flashattn_device_properties, 40, (
        (:struct_size, 0, 4),
        (:units, 4, 4),
        (:name, 8, 8),
        (:isa, 16, 8),
        (:compute_capability, 24, 4),
        (:local_memory, 28, 4),
        (:memory, 32, 8),
    )),
    (flashattn_plan_properties, 88, (
        (:struct_size, 0, 4),
        (:tile_q, 4, 4),
        (:tile_kv, 8, 4),
        (:stages, 12, 4),
        (:threads, 16, 4),
        (:registers, 20, 4),
        (:local_memory, 24, 4),
        (:splits, 28, 4),
        (:family, 32, 8),
        (:kernel, 40, 8),
        (:isa, 48, 8),
        (:why, 56, 8),
        (:flops, 64, 8),
        (:bytes, 72, 8),
        (:workspace, 80, 8),
    )),
)

end
