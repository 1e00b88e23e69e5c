# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""Names and numbers of the C header: enumerations, structures, arrays, documentation of
functions."""
from enum import IntEnum, IntFlag
from typing import Any, Dict, NamedTuple, Tuple, TypedDict

HEADER_VERSION = 200


class Status(IntEnum):
    """What a call says of itself. Stored and returned as int32_t."""

    OK = 0
    #: A field, pointer or size that no library of this version could honour on any device.
    ERROR_INVALID_ARGUMENT = 1
    #: A meaningful request that no backend of this build honours on this device.
    ERROR_UNSUPPORTED = 2
    #: The workspace is smaller than flashattn_workspace_size says.
    ERROR_WORKSPACE = 3
    #: Host memory ran out.
    ERROR_OUT_OF_MEMORY = 4
    #: The device or its driver reported an error, or the wrong device is current.
    ERROR_DEVICE = 5
    #: struct_size is that of a structure of 0.1, above 4096, or larger than known with a part that is
    #: not zero: a newer header.
    ERROR_VERSION = 6
    #: A fault of the library itself. Please report it with the message.
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
    #: dtype and one of dtype_kv, dtype_o and dtype_bias do not go together.
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
    #: The backend was switched off when the library was built.
    NOT_IN_THIS_BUILD = 22
    #: The plan was not made for this operation: see flashattn_desc.ops.
    OP = 23
    #: A required pointer is NULL, or one that the plan does not use is not.
    NULL_POINTER = 24
    MISALIGNED = 25
    OVERLAP = 26
    #: A size is zero, negative, above the plan's maximum, or overflows.
    SIZE = 27
    STRIDE = 28
    #: An enumerator or bit this library does not know, or a value outside its range.
    VALUE = 29
    RESERVED = 30
    STRUCT_SIZE = 31
    #: cu_seqlens, lens, starts or a page table hold an impossible value (CPU only: read there).
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
    #: A signed byte: an element of a quantised cache, for dtype_kv alone. CPU only.
    I8 = 6


class Layout(IntFlag):
    """How sequences lie in memory, as bits. None: dense (batch, seq, head, dim)."""

    #: Q, O and their gradients are (total_q, head, dim); cu_seqlens_q says where sequences start.
    VARLEN_Q = 1
    #: K, V and their gradients are (total_kv, head, dim); cu_seqlens_kv says where they start.
    VARLEN_KV = 2
    #: K and V are pools of pages (page, page_size, head, dim); page_table says which. Forward only,
    #: not together with VARLEN_KV.
    PAGED_KV = 4
    #: The quantised cache of latent attention (DeepSeek-AI 2024). A key is its value and dim_qk - dim_v
    #: elements more, which rotate: v holds those of dtype_kv, F8E4M3 or I8, descale_latent a descale
    #: for each descale_dim of them, and k only those behind, in the type of q. So lies a record of 656
    #: bytes a token, 512 of v, 4 descales, 64 of k in 16 bits: three arrays with stride_seq = 656, 164
    #: and 328. GPUs want these strides to be the same in bytes. Forward only; flashattn_quantize and
    #: flashattn_append_kv refuse it.
    LATENT_KV = 8


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
    #: block_mask[b, h, i / block_q, j / block_kv] != 0. A block of which the other masks hide nothing
    #: needs no other number: kernels tell from positions.
    BLOCKS = 16
    #: Of the last `tree` keys, j >= Sk - tree, query i sees those whose bit j - (Sk - tree) of
    #: tree_bits[b, i] is set: drafted tokens, each with its own past. CAUSAL, WINDOW and CHUNK then
    #: hold for the keys before only, BLOCKS and a boolean mask for all. A sequence with fewer keys
    #: than `tree` has the last bits. Forward only.
    TREE = 32
    #: page_table[b, j / page_size] >= 0: a negative page number hides its keys from all queries, and
    #: they need no memory. Where every query is a sequence of its own (batch * seqlen_q sequences of
    #: one query) and page_size is 1, the page table is a list of tokens for each query, and -1 fills
    #: it: sparse attention by token indices (DeepSeek-AI 2025). Only with PAGED_KV.
    PAGES = 64
    #: With BLOCKS: block_index lists the blocks that are on, in the place of block_mask, as the block
    #: masks of FlexAttention and block-sparse rows do.
    BLOCK_LISTS = 128
    #: With BLOCKS: j % block_kv < block_lens[b, h, j / block_kv]: the keys of a block that count, as of
    #: tiles of video that are not full.
    BLOCK_LENS = 256


class Bias(IntFlag):
    """What is added to the scores, as bits."""

    #: - alibi_slopes[h] * |i + off - j|  (Press et al. 2022)
    ALIBI = 1
    #: + bias[b, h, i, j]; with dtype_bias U8 a boolean mask.
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
    """Which results must repeat bit for bit; of a NaN, only that it is one. Each level includes the one
    before.
    """

    #: Whatever is fastest. On the CPU: always BATCH_INVARIANT.
    DEFAULT = 0
    #: The same call on the same device gives the same bits.
    RUN_TO_RUN = 1
    #: A sequence's bits do not depend on what else is in the batch.
    BATCH_INVARIANT = 2


class Transform(IntFlag):
    """Transforms of q and k by flashattn_quantize before it rounds them, as bits. Neither changes a
    score in exact arithmetic but by what lse_shift says; both make the rounding errors of scores
    smaller.
    """

    #: k minus its mean over the tokens of its sequence: the same for all keys of a query, which the
    #: softmax does not see. Not with a plan that has softcap or SINK (Zhang et al. 2024).
    SMOOTH_K = 1
    #: q and k times diag(signs) H / sqrt(n): an orthogonal matrix that spreads outliers over n
    #: elements, H being the Hadamard matrix of the largest power of two n that divides dim_qk; n is
    #: dim_qk or at least 32 (Shah et al. 2024, incoherent processing).
    ROTATE = 2


class Rotary(IntEnum):
    """Which elements of a head flashattn_append_kv rotates together: pair c of the first rotary_dim."""

    #: Elements c and c + rotary_dim / 2 (GPT-NeoX, Llama).
    HALVES = 0
    #: Elements 2 c and 2 c + 1 (Su et al. 2021).
    INTERLEAVED = 1


class LogLevel(IntEnum):
    """flashattn_log_level"""

    OFF = 0
    #: The message of every call that fails.
    ERROR = 1
    #: Also: the kernel that each plan chose, and why.
    INFO = 2
    #: Also: every backend that refused, with its reason.
    DEBUG = 3


class Descriptor(NamedTuple):
    """flashattn_desc."""

    #: enum flashattn_device. 0: the CPU.
    device: int = 0
    #: The device's number among its kind, from 0. CUDA: the runtime's ordinal.
    device_index: int = 0
    #: enum flashattn_op bits. 0: forward only.
    ops: int = 0
    #: Required: enum flashattn_dtype of q, and of k and v unless dtype_kv is set. F8E4M3: elements
    #: times a descale are the numbers meant; see flashattn_args.
    dtype: int = 0
    #: The type of k and v. 0: as dtype. F8E4M3 beside another dtype, and I8 beside any, mean a
    #: quantised cache, whose elements times a descale are the numbers meant.
    dtype_kv: int = 0
    #: The type of o and dout. 0: as dtype. F32 is possible beside all inputs. With 8-bit inputs also
    #: F16, BF16 and, unless ops has BACKWARD, F8E4M3.
    dtype_o: int = 0
    #: Required: query heads, >= 1.
    heads_q: int = 0
    #: Key and value heads; heads_q must be a multiple. 0: as heads_q. Query head h reads KV head
    #: h / (heads_q / heads_kv).
    heads_kv: int = 0
    #: Required: elements of a query and a key, >= 1.
    dim_qk: int = 0
    #: Elements of a value. 0: as dim_qk.
    dim_v: int = 0
    #: enum flashattn_layout bits.
    layout: int = 0
    #: Tokens a page, >= 1. Only with PAGED_KV, 0 otherwise.
    page_size: int = 0
    #: enum flashattn_mask bits.
    mask: int = 0
    #: Keys visible to the left and right of the diagonal; -1: open. Only with WINDOW.
    window_left: int = 0
    window_right: int = 0
    #: Tokens a chunk, >= 1. Only with CHUNK.
    chunk: int = 0
    #: Queries and keys a block of the block mask, >= 1. Only with BLOCKS.
    block_q: int = 0
    block_kv: int = 0
    #: Keys at the end of each sequence that are drafted tokens, 1 to 256. Only with TREE.
    tree: int = 0
    #: enum flashattn_bias bits.
    bias: int = 0
    #: Of the dense bias: F32, F16, BF16 or U8. 0: as dtype. Only with DENSE.
    dtype_bias: int = 0
    #: enum flashattn_feature bits.
    features: int = 0
    #: enum flashattn_determinism.
    determinism: int = 0
    #: Factor of the scores. 0: 1 / sqrt(dim_qk). Of magnitude below 2^127.
    scale: float = 0.0
    #: Scores become softcap * tanh(score / softcap). 0: off. Below 2^127, as is scale / softcap.
    softcap: float = 0.0
    #: Probability with which a weight is dropped, [0, 1), rounded to steps of 1/65536. 0: off. What
    #: rounds to 0 or to 1 is refused.
    dropout: float = 0.0
    #: Tokens that share a descale, >= 1. 0: all of a sequence. Only with F8E4M3 or I8, and not with
    #: LATENT_KV, where each token has its own.
    descale_block: int = 0
    #: Splits of a sequence's keys in the forward pass (split-KV), at most 4096. 0: the library
    #: chooses, for short queries only. 1: never.
    splits: int = 0
    #: Maxima: no call may pass them. 0: none. They let flashattn_workspace_size answer for all calls
    #: at once, and help to choose a kernel.
    max_batch: int = 0
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    #: GPU: streaming multiprocessors to use at the most. 0: all.
    multiprocessors: int = 0
    #: CPU: threads to use at the most; more than 1024 are as 1024. 0: all cores that the process may
    #: use (affinity and cgroup quota). 1: the caller's only. The library's threads are started when
    #: first needed, kept, and shared by all calls; where the system gives fewer, those do the work. A
    #: child made by fork has as many.
    threads: int = 0
    #: Maxima, as above, for VARLEN layouts: tokens of all sequences together.
    max_total_q: int = 0
    max_total_kv: int = 0
    #: Bytes of workspace that calls within the maxima may need. Kernels that need more are not
    #: chosen, and flashattn_plan_info says so. The plan is refused when none fits. 0: no limit.
    workspace_limit: int = 0
    #: The type of dq, dk and dv. 0: as dtype or, where that is F8E4M3, as dtype_o. F32, F16 or BF16
    #: beside 8-bit inputs, which have the range of no gradient; otherwise as dtype.
    dtype_grad: int = 0
    #: Elements of a value that share a descale, >= 1; 128 in DeepSeek's cache. Only with LATENT_KV.
    descale_dim: int = 0


class DeviceInfo(NamedTuple):
    """flashattn_device_properties."""

    #: "cpu", "cuda"
    kind: str
    device_index: int
    #: GPU: streaming multiprocessors. CPU: 0.
    multiprocessors: int
    #: CPU: threads that a plan with threads = 0 uses. GPU: 0.
    threads: int
    #: GPU: compute capability, 90 for 9.0. CPU: 0.
    compute_capability: int
    #: "AMD EPYC 9354", "NVIDIA H200".
    name: str
    #: The best kernels this build has for it: "avx512_bf16", "sm90".
    isa: str
    #: GPU: bytes of shared memory that a CTA may use. CPU: 0.
    shared_memory: int
    #: Bytes of L2 cache. CPU: of a core.
    l2_cache: int
    #: Bytes of memory.
    memory: int


class PlanInfo(NamedTuple):
    """flashattn_plan_properties."""

    #: Queries and keys of a tile.
    tile_q: int
    tile_kv: int
    #: Tiles in flight; 1: none ahead.
    stages: int
    #: CPU: threads at the most. GPU: threads of a CTA.
    threads: int
    #: GPU: registers of a thread. CPU: 0.
    registers: int
    #: GPU: bytes of shared memory of a CTA. CPU: 0.
    shared_memory: int
    #: CPU: bytes of workspace that a thread keeps to itself. GPU: 0.
    scratch: int
    #: Splits of the longest sequence's keys for these sizes.
    splits: int
    #: "cpu", "sm90".
    backend: str
    #: The kernel's name. Lives as long as the plan, as do the next two.
    kernel: str
    #: Instructions it is made of: "avx512_bf16".
    isa: str
    #: Message: why this kernel.
    why: str
    #: For the sizes asked about: arithmetic of the visible pairs, 2 for a multiply-add: 2 (dim_qk +
    #: dim_v) a pair forward, 2.5 times that backward. Block masks, lens and bias count as visible.
    flops: int
    #: Least bytes to move: every input read once, every output written once.
    bytes: int
    #: flashattn_workspace_size.
    workspace: int


class Dim(NamedTuple):
    """The extent of an index: size + more, or ceil(size / by); size may be a number."""

    size: str
    #: The member of flashattn_tensor that steps over the index; "": it is contiguous.
    stride: str
    more: int = 0
    by: str = ""


class Array(NamedTuple):
    """An array of a structure of arguments, as its comment in the header describes it."""

    #: "input", "output", and of flashattn_args "upstream" (gradients that backward reads) and
    #: "gradient".
    role: str
    #: It has strides; else it is packed.
    tensor: bool
    #: "i32", "f32", ..., or the member of flashattn_desc or of the structure that says it.
    type: str
    #: "required with VARLEN_Q"
    condition: str
    dims: Tuple[Dim, ...]
    #: Layouts with other dims.
    layouts: Dict[str, Tuple[Dim, ...]] = {}
    #: A host array of such arrays.
    parts: bool = False


# By structure and name.
ARRAYS: Dict[str, Dict[str, Array]] = {
    "flashattn_args": {
        "q": Array("input", True, "dtype", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "k": Array("input", True, "dtype_kv", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "v": Array("input", True, "dtype_kv", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "cu_seqlens_q": Array("input", False, "i32", "required with VARLEN_Q", (
            Dim("batch", "stride_batch", 1),
        )),
        "cu_seqlens_kv": Array("input", False, "i32", "required with VARLEN_KV", (
            Dim("batch", "stride_batch", 1),
        )),
        "lens_q": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "lens_kv": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "starts_kv": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "page_table": Array("input", True, "i32", "required with PAGED_KV", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "", by="page_size"),
        )),
        "bias": Array("input", True, "dtype_bias", "required with DENSE", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
            Dim("seqlen_kv", ""),
        )),
        "alibi_slopes": Array("input", True, "f32", "required with ALIBI", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
        )),
        "sink": Array("input", False, "f32", "required with SINK", (
            Dim("heads_q", "stride_head"),
        )),
        "block_mask": Array("input", True, "u8", "required with BLOCKS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="block_q"),
            Dim("seqlen_kv", "", by="block_kv"),
        )),
        "tree_bits": Array("input", True, "u32", "required with TREE", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("tree", "", by="32"),
        )),
        "descale_q": Array("input", True, "f32", "optional with dtype F8E4M3", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="descale_block"),
        )),
        "descale_k": Array("input", True, "f32", "optional with F8E4M3 or I8", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "descale_v": Array("input", True, "f32", "optional with F8E4M3 or I8", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "rng_device": Array("input", False, "u64", "optional with dropout", (
            Dim("2", "stride_seq"),
        )),
        "o": Array("output", True, "dtype_o", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "lse": Array("output", False, "f32", "required with LSE and for backward", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
        ), {
            "VARLEN_Q": (
                Dim("heads_q", "stride_head"),
                Dim("total_q", "stride_seq"),
            ),
        }),
        "dout": Array("upstream", True, "dtype_o", "required for backward", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "dlse": Array("upstream", False, "f32", "required with DLSE", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
        ), {
            "VARLEN_Q": (
                Dim("heads_q", "stride_head"),
                Dim("total_q", "stride_seq"),
            ),
        }),
        "dq": Array("gradient", True, "dtype_grad", "required for backward", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "dk": Array("gradient", True, "dtype_grad", "required for backward", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "dv": Array("gradient", True, "dtype_grad", "required for backward", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "dbias": Array("gradient", True, "f32", "required with DBIAS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
            Dim("seqlen_kv", ""),
        )),
        "dsink": Array("gradient", False, "f32", "required with DSINK", (
            Dim("heads_q", "stride_head"),
        )),
        "scale_o": Array("input", True, "f32", "optional with dtype_o F8E4M3", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
        )),
        "amax_o": Array("output", True, "f32", "optional with F8E4M3 or I8", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
        )),
        "descale_latent": Array("input", True, "f32", "required with LATENT_KV", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", "", by="descale_dim"),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", "", by="descale_dim"),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", "", by="descale_dim"),
            ),
        }),
        "block_index": Array("input", True, "i32", "required with BLOCK_LISTS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="block_q"),
            Dim("block_entries", ""),
        )),
        "block_begin": Array("input", True, "i32", "optional with BLOCK_LISTS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="block_q"),
        )),
        "block_end": Array("input", True, "i32", "optional with BLOCK_LISTS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="block_q"),
        )),
        "block_lens": Array("input", True, "i32", "required with BLOCK_LENS", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="block_kv"),
        )),
    },
    "flashattn_merge_args": {
        "part_o": Array("input", True, "dtype_part", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_v", ""),
            ),
        }, parts=True),
        "part_lse": Array("input", False, "f32", "required", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
        ), {
            "VARLEN_Q": (
                Dim("heads_q", "stride_head"),
                Dim("total_q", "stride_seq"),
            ),
        }, parts=True),
        "o": Array("output", True, "dtype_o", "required", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "lse": Array("output", False, "f32", "optional", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
        ), {
            "VARLEN_Q": (
                Dim("heads_q", "stride_head"),
                Dim("total_q", "stride_seq"),
            ),
        }),
    },
    "flashattn_quantize_args": {
        "cu_seqlens_q": Array("input", False, "i32", "required with VARLEN_Q", (
            Dim("batch", "stride_batch", 1),
        )),
        "cu_seqlens_kv": Array("input", False, "i32", "required with VARLEN_KV", (
            Dim("batch", "stride_batch", 1),
        )),
        "lens_q": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "lens_kv": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "starts_kv": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "q": Array("input", True, "dtype", "optional", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "k": Array("input", True, "dtype", "optional", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "v": Array("input", True, "dtype", "optional", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "q_out": Array("output", True, "dtype", "required with q", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "k_out": Array("output", True, "dtype_kv", "required with k", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "v_out": Array("output", True, "dtype_kv", "required with v", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "descale_q": Array("output", True, "f32", "required with q in F8E4M3", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_q", "stride_seq", by="descale_block"),
        )),
        "descale_k": Array("output", True, "f32", "required with k", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "descale_v": Array("output", True, "f32", "required with v", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "k_mean": Array("output", True, "f32", "required with SMOOTH_K", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        )),
        "lse_shift": Array("output", False, "f32", "optional with q, k and SMOOTH_K", (
            Dim("batch", "stride_batch"),
            Dim("heads_q", "stride_head"),
            Dim("seqlen_q", "stride_seq"),
        ), {
            "VARLEN_Q": (
                Dim("heads_q", "stride_head"),
                Dim("total_q", "stride_seq"),
            ),
        }),
    },
    "flashattn_append_kv_args": {
        "cu_seqlens_q": Array("input", False, "i32", "required with VARLEN_Q", (
            Dim("batch", "stride_batch", 1),
        )),
        "cu_seqlens_kv": Array("input", False, "i32", "required with VARLEN_KV", (
            Dim("batch", "stride_batch", 1),
        )),
        "lens_q": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "lens_kv": Array("input", False, "i32", "required", (
            Dim("batch", "stride_batch"),
        )),
        "starts_kv": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "positions": Array("input", False, "i32", "optional", (
            Dim("batch", "stride_batch"),
        )),
        "lens_out": Array("output", False, "i32", "optional with k or v", (
            Dim("batch", "stride_batch"),
        )),
        "page_table": Array("input", True, "i32", "required with PAGED_KV", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "", by="page_size"),
        )),
        "q": Array("input", True, "dtype", "optional with rotary_dim", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "k": Array("input", True, "dtype", "optional", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "v": Array("input", True, "dtype", "optional", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "q_out": Array("output", True, "dtype", "required with q", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_q", "stride_seq"),
            Dim("heads_q", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_Q": (
                Dim("total_q", "stride_seq"),
                Dim("heads_q", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "k_cache": Array("output", True, "dtype_kv", "required with k", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_qk", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_qk", ""),
            ),
        }),
        "v_cache": Array("output", True, "dtype_kv", "required with v", (
            Dim("batch", "stride_batch"),
            Dim("seqlen_kv", "stride_seq"),
            Dim("heads_kv", "stride_head"),
            Dim("dim_v", ""),
        ), {
            "VARLEN_KV": (
                Dim("total_kv", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
            "PAGED_KV": (
                Dim("pages", "stride_batch"),
                Dim("page_size", "stride_seq"),
                Dim("heads_kv", "stride_head"),
                Dim("dim_v", ""),
            ),
        }),
        "descale_k": Array("input", True, "f32",
            "optional with k and a cache of F8E4M3 or I8, required with update_descales", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "descale_v": Array("input", True, "f32", "optional with v and a cache of F8E4M3 or I8", (
            Dim("batch", "stride_batch"),
            Dim("heads_kv", "stride_head"),
            Dim("seqlen_kv", "stride_seq", by="descale_block"),
        )),
        "rotary_cos": Array("input", True, "dtype_rotary", "optional with rotary_dim", (
            Dim("rotary_positions", "stride_seq"),
            Dim("rotary_dim", "", by="2"),
        )),
        "rotary_sin": Array("input", True, "dtype_rotary", "required with rotary_cos", (
            Dim("rotary_positions", "stride_seq"),
            Dim("rotary_dim", "", by="2"),
        )),
    },
}


class ArrayOptions(TypedDict, total=False):
    """Arrays of flashattn_args."""

    #: (batch); i32; optional. Tokens in use of each sequence, at most its capacity.
    lens_q: Any
    #: (batch); i32; optional.
    lens_kv: Any
    #: (batch); i32; optional. Left padding: keys before starts_kv[b] do not exist. Key positions, of
    #: masks, ALiBi, bias and dropout, count from there, and Sk is the length that is left. Rows of dk
    #: and dv before are not written. Not with PAGED_KV.
    starts_kv: Any
    #: (batch, heads_q, seqlen_q, seqlen_kv); dtype_bias; required with DENSE.
    bias: Any
    #: (batch, heads_q); f32; required with ALIBI.
    alibi_slopes: Any
    #: (heads_q); f32; required with SINK. Natural logits.
    sink: Any
    #: (batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)); u8; required with
    #: BLOCKS. Not with BLOCK_LISTS.
    block_mask: Any
    #: (batch, seqlen_q, ceil(tree / 32)); u32; required with TREE. Bit n % 32 of word n / 32, the
    #: least being bit 0, is of key Sk - tree + n; bits from `tree` on are ignored. Also with VARLEN_Q
    #: a row is a query of its sequence.
    tree_bits: Any
    #: (batch, heads_kv, ceil(seqlen_q / descale_block)); f32; optional with dtype F8E4M3. A factor of
    #: q, at least 0, which the query heads of a KV head share. Blocks count i from the start of a
    #: sequence, those of k and v count j. NULL: 1.
    descale_q: Any
    #: (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with F8E4M3 or I8. A factor
    #: of k, at least 0. NULL: 1.
    descale_k: Any
    #: (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with F8E4M3 or I8. A factor
    #: of v, at least 0. NULL: 1.
    descale_v: Any
    #: (2); u64; optional with dropout. {seed, offset}, to which the two above are added: CUDA graphs
    #: can be replayed with new numbers.
    rng_device: Any
    #: (batch, heads_q); f32; optional with dtype_o F8E4M3. o is written as o * scale_o, rounded to
    #: nearest even; what is larger than 448 becomes 448. NULL: 1.
    scale_o: Any
    #: (batch, seqlen_kv, heads_kv, ceil(dim_v / descale_dim)); f32; required with LATENT_KV. A factor of
    #: v, at least 0. It lies as v does: VARLEN_KV: (total_kv, heads_kv, ceil(dim_v / descale_dim)).
    #: PAGED_KV: (pages, page_size, heads_kv, ceil(dim_v / descale_dim)).
    descale_latent: Any
    #: (batch, heads_q, ceil(seqlen_q / block_q), block_entries); i32; required with BLOCK_LISTS. For
    #: each block of queries a row that has the numbers of the blocks of keys that it sees, in any
    #: order. What is no number of a block, as -1 is not, counts for nothing.
    block_index: Any
    #: (batch, heads_q, ceil(seqlen_q / block_q)); i32; optional with BLOCK_LISTS. The first entry of
    #: block_index's row that counts. NULL: 0. Of block-sparse rows it is indptr, and a stride_seq of 0
    #: lets them all be in one row of block_index.
    block_begin: Any
    #: (batch, heads_q, ceil(seqlen_q / block_q)); i32; optional with BLOCK_LISTS. The end of the entries
    #: that count: how many there are where block_begin is NULL, indptr + 1 of block-sparse rows. NULL:
    #: block_entries.
    block_end: Any
    #: (batch, heads_q, ceil(seqlen_kv / block_kv)); i32; required with BLOCK_LENS. Keys of a block that
    #: count, from its first on: at least 0, at most block_kv.
    block_lens: Any


class OutputOptions(TypedDict, total=False):
    """Arrays of flashattn_args."""

    #: (batch, heads_q); f32; optional with F8E4M3 or I8. Forward writes it: the largest |o|, before
    #: scale_o and rounding, for the scale of a later call; 0 where there are no queries. A stride of 0:
    #: the largest over that index. On a GPU scores beyond 2^20 may raise it by some percent. Not with
    #: LATENT_KV.
    amax_o: Any


class QuantizeOptions(TypedDict, total=False):
    """Arrays of flashattn_quantize_args."""

    #: (batch + 1); i32; required with VARLEN_Q. Sequence b holds rows [cu[b], cu[b + 1]).
    #: Rows past a length are neither read nor written.
    cu_seqlens_q: Any
    #: (batch + 1); i32; required with VARLEN_KV.
    cu_seqlens_kv: Any
    #: (batch); i32; optional. Tokens in use of each sequence, at most its capacity.
    lens_q: Any
    #: (batch); i32; optional.
    lens_kv: Any
    #: (batch); i32; optional. Left padding: keys before starts_kv[b] do not exist. Key positions, of
    #: masks, ALiBi, bias and dropout, count from there, and Sk is the length that is left. Rows of dk
    #: and dv before are not written. Not with PAGED_KV.
    starts_kv: Any


class AppendKvOptions(TypedDict, total=False):
    """Arrays of flashattn_append_kv_args."""

    #: (batch + 1); i32; required with VARLEN_Q. Sequence b holds rows [cu[b], cu[b + 1]).
    cu_seqlens_q: Any
    #: (batch + 1); i32; required with VARLEN_KV.
    cu_seqlens_kv: Any
    #: (batch); i32; optional. Tokens in use of each sequence, at most its capacity.
    #: New tokens past these are neither read nor written.
    lens_q: Any
    #: (batch); i32; optional. Left padding: keys before starts_kv[b] do not exist. Key positions, of
    #: masks, ALiBi, bias and dropout, count from there, and Sk is the length that is left. Rows of dk
    #: and dv before are not written. Not with PAGED_KV.
    starts_kv: Any
    #: (batch); i32; optional. The position of each sequence's first new token, for the rotation.
    #: NULL: lens_kv, less starts_kv.
    positions: Any
    #: (batch); i32; optional with k or v. Written: lens_kv plus the new tokens, as forward needs it.
    #: May be lens_kv itself, which is then incremented.
    lens_out: Any
    #: (batch, ceil(seqlen_kv / page_size)); i32; required with PAGED_KV. Page numbers; with
    #: PAGES a negative one hides the keys of its page.
    #: Only entries of pages that are written are used.
    page_table: Any
    #: (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with k and a cache of F8E4M3
    #: or I8, required with update_descales. Above 0: k times 1 / descale_k is rounded to nearest even,
    #: and 448 beyond; I8: 127 beyond, and a NaN becomes 0. NULL: 1.
    descale_k: Any
    #: (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with v and a cache of F8E4M3
    #: or I8. Likewise.
    descale_v: Any
    #: (rotary_positions, rotary_dim / 2); dtype_rotary; optional with rotary_dim. Row p is of position
    #: p.
    rotary_cos: Any
    #: (rotary_positions, rotary_dim / 2); dtype_rotary; required with rotary_cos.
    rotary_sin: Any


# Structure: (bytes, ((field, offset, bytes), ...)).
LAYOUT: Dict[str, Tuple[int, Tuple[Tuple[str, int, int], ...]]] = {
    "flashattn_error": (720, (
        ("struct_size", 0, 4),
        ("status", 4, 4),
        ("reason", 8, 4),
        ("reserved", 12, 4),
        ("field", 16, 64),
        ("message", 80, 640),
    )),
    "flashattn_desc": (168, (
        ("struct_size", 0, 4),
        ("device", 4, 4),
        ("device_index", 8, 4),
        ("ops", 12, 4),
        ("dtype", 16, 4),
        ("dtype_kv", 20, 4),
        ("dtype_o", 24, 4),
        ("heads_q", 28, 4),
        ("heads_kv", 32, 4),
        ("dim_qk", 36, 4),
        ("dim_v", 40, 4),
        ("layout", 44, 4),
        ("page_size", 48, 4),
        ("mask", 52, 4),
        ("window_left", 56, 4),
        ("window_right", 60, 4),
        ("chunk", 64, 4),
        ("block_q", 68, 4),
        ("block_kv", 72, 4),
        ("tree", 76, 4),
        ("bias", 80, 4),
        ("dtype_bias", 84, 4),
        ("features", 88, 4),
        ("determinism", 92, 4),
        ("scale", 96, 4),
        ("softcap", 100, 4),
        ("dropout", 104, 4),
        ("descale_block", 108, 4),
        ("splits", 112, 4),
        ("max_batch", 116, 4),
        ("max_seqlen_q", 120, 4),
        ("max_seqlen_kv", 124, 4),
        ("multiprocessors", 128, 4),
        ("threads", 132, 4),
        ("max_total_q", 136, 8),
        ("max_total_kv", 144, 8),
        ("workspace_limit", 152, 8),
        ("dtype_grad", 160, 4),
        ("descale_dim", 164, 4),
    )),
    "flashattn_tensor": (32, (
        ("data", 0, 8),
        ("stride_batch", 8, 8),
        ("stride_head", 16, 8),
        ("stride_seq", 24, 8),
    )),
    "flashattn_args": (936, (
        ("struct_size", 0, 4),
        ("batch", 4, 4),
        ("seqlen_q", 8, 4),
        ("seqlen_kv", 12, 4),
        ("total_q", 16, 8),
        ("total_kv", 24, 8),
        ("q", 32, 32),
        ("k", 64, 32),
        ("v", 96, 32),
        ("cu_seqlens_q", 128, 8),
        ("cu_seqlens_kv", 136, 8),
        ("lens_q", 144, 8),
        ("lens_kv", 152, 8),
        ("starts_kv", 160, 8),
        ("page_table", 168, 32),
        ("pages", 200, 8),
        ("bias", 208, 32),
        ("alibi_slopes", 240, 32),
        ("sink", 272, 8),
        ("block_mask", 280, 32),
        ("tree_bits", 312, 32),
        ("descale_q", 344, 32),
        ("descale_k", 376, 32),
        ("descale_v", 408, 32),
        ("rng_seed", 440, 8),
        ("rng_offset", 448, 8),
        ("rng_device", 456, 8),
        ("o", 464, 32),
        ("lse", 496, 8),
        ("dout", 504, 32),
        ("dlse", 536, 8),
        ("dq", 544, 32),
        ("dk", 576, 32),
        ("dv", 608, 32),
        ("dbias", 640, 32),
        ("dsink", 672, 8),
        ("parallel", 680, 8),
        ("parallel_user", 688, 8),
        ("error", 696, 8),
        ("scale_o", 704, 32),
        ("amax_o", 736, 32),
        ("descale_latent", 768, 32),
        ("block_index", 800, 32),
        ("block_begin", 832, 32),
        ("block_end", 864, 32),
        ("block_entries", 896, 8),
        ("block_lens", 904, 32),
    )),
    "flashattn_merge_args": (112, (
        ("struct_size", 0, 4),
        ("parts", 4, 4),
        ("batch", 8, 4),
        ("seqlen_q", 12, 4),
        ("total_q", 16, 8),
        ("part_o", 24, 8),
        ("part_lse", 32, 8),
        ("dtype_part", 40, 4),
        ("reserved", 44, 4),
        ("o", 48, 32),
        ("lse", 80, 8),
        ("parallel", 88, 8),
        ("parallel_user", 96, 8),
        ("error", 104, 8),
    )),
    "flashattn_quantize_args": (440, (
        ("struct_size", 0, 4),
        ("batch", 4, 4),
        ("seqlen_q", 8, 4),
        ("seqlen_kv", 12, 4),
        ("total_q", 16, 8),
        ("total_kv", 24, 8),
        ("dtype", 32, 4),
        ("transform", 36, 4),
        ("rotation_seed", 40, 8),
        ("cu_seqlens_q", 48, 8),
        ("cu_seqlens_kv", 56, 8),
        ("lens_q", 64, 8),
        ("lens_kv", 72, 8),
        ("starts_kv", 80, 8),
        ("q", 88, 32),
        ("k", 120, 32),
        ("v", 152, 32),
        ("q_out", 184, 32),
        ("k_out", 216, 32),
        ("v_out", 248, 32),
        ("descale_q", 280, 32),
        ("descale_k", 312, 32),
        ("descale_v", 344, 32),
        ("k_mean", 376, 32),
        ("lse_shift", 408, 8),
        ("parallel", 416, 8),
        ("parallel_user", 424, 8),
        ("error", 432, 8),
    )),
    "flashattn_append_kv_args": (504, (
        ("struct_size", 0, 4),
        ("batch", 4, 4),
        ("seqlen_q", 8, 4),
        ("seqlen_kv", 12, 4),
        ("total_q", 16, 8),
        ("total_kv", 24, 8),
        ("dtype", 32, 4),
        ("rotary", 36, 4),
        ("rotary_dim", 40, 4),
        ("rotary_positions", 44, 4),
        ("dtype_rotary", 48, 4),
        ("rotary_base", 52, 4),
        ("cu_seqlens_q", 56, 8),
        ("cu_seqlens_kv", 64, 8),
        ("lens_q", 72, 8),
        ("lens_kv", 80, 8),
        ("starts_kv", 88, 8),
        ("positions", 96, 8),
        ("lens_out", 104, 8),
        ("page_table", 112, 32),
        ("pages", 144, 8),
        ("q", 152, 32),
        ("k", 184, 32),
        ("v", 216, 32),
        ("q_out", 248, 32),
        ("k_cache", 280, 32),
        ("v_cache", 312, 32),
        ("descale_k", 344, 32),
        ("descale_v", 376, 32),
        ("rotary_cos", 408, 32),
        ("rotary_sin", 440, 32),
        ("parallel", 472, 8),
        ("parallel_user", 480, 8),
        ("error", 488, 8),
        ("update_descales", 496, 4),
        ("reserved", 500, 4),
    )),
    "flashattn_device_properties": (48, (
        ("struct_size", 0, 4),
        ("multiprocessors", 4, 4),
        ("threads", 8, 4),
        ("compute_capability", 12, 4),
        ("name", 16, 8),
        ("isa", 24, 8),
        ("shared_memory", 32, 4),
        ("l2_cache", 36, 4),
        ("memory", 40, 8),
    )),
    "flashattn_plan_properties": (96, (
        ("struct_size", 0, 4),
        ("tile_q", 4, 4),
        ("tile_kv", 8, 4),
        ("stages", 12, 4),
        ("threads", 16, 4),
        ("registers", 20, 4),
        ("shared_memory", 24, 4),
        ("scratch", 28, 4),
        ("splits", 32, 4),
        ("reserved", 36, 4),
        ("backend", 40, 8),
        ("kernel", 48, 8),
        ("isa", 56, 8),
        ("why", 64, 8),
        ("flops", 72, 8),
        ("bytes", 80, 8),
        ("workspace", 88, 8),
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

The version as text: "0.2.0".
""",
    "flashattn_build_info": """\
const char *flashattn_build_info(void)

One line: version, compiler, instruction sets and GPU architectures in this build.
""",
    "flashattn_status_name": """\
const char *flashattn_status_name(int32_t status)

The name of an enum flashattn_status, "FLASHATTN_OK"; "unknown status" for any other number.
""",
    "flashattn_last_error": """\
const char *flashattn_last_error(int32_t *reason, const char **field)

The message of the last call of this thread that failed; "" when none did. Successful calls
leave it alone. It lives until the next call of this thread fails, and so does the field.
  reason   out, may be NULL: enum flashattn_reason.
  field    out, may be NULL: the structure member it is about, "dim_qk", "q.stride_seq"; "" when
           there is none.
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
int32_t flashattn_check(const flashattn_desc *desc, flashattn_error *error)

Whether flashattn_plan_create would succeed; if not, flashattn_last_error says why. Makes a plan
and frees it.
  error   out, may be NULL.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
""",
    "flashattn_plan_create": """\
int32_t flashattn_plan_create(const flashattn_desc *desc, flashattn_plan **plan,
    flashattn_error *error)

Checks the descriptor, chooses the kernels and does everything that is slow. The choice depends
on the descriptor, the device and the library's version, and on two environment variables for
tests, read once: FLASHATTN_BACKEND asks for a GPU backend (sm80, sm90), FLASHATTN_CPU_ISA for an
instruction set.
  desc    may be freed afterwards.
  plan    out: to be freed by flashattn_plan_destroy. Untouched on failure.
  error   out, may be NULL.
INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
""",
    "flashattn_plan_destroy": """\
void flashattn_plan_destroy(flashattn_plan *plan)

Frees a plan; NULL is fine. Work already enqueued on a stream is not disturbed.
""",
    "flashattn_plan_desc": """\
int32_t flashattn_plan_desc(const flashattn_plan *plan, flashattn_desc *desc)

The descriptor of a plan with every default resolved: heads_kv, dim_v, types, scale.
  desc   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION.
""",
    "flashattn_plan_info": """\
int32_t flashattn_plan_info(const flashattn_plan *plan, uint32_t op, const flashattn_args *args,
    flashattn_plan_properties *properties)

Says which kernel an operation uses and what it costs.
  op           one enum flashattn_op of the plan.
  args         its sizes are read. May be NULL: the plan's maxima; what depends on a maximum that
               is not set is then 0.
  properties   in: struct_size; out: the rest.
INVALID_ARGUMENT, VERSION.
""",
    "flashattn_workspace_size": """\
int32_t flashattn_workspace_size(const flashattn_plan *plan, uint32_t op,
    const flashattn_args *args, int64_t *bytes)

Bytes of workspace that an operation needs: linear in the sequence length, never smaller for
larger sizes, known before any pointer exists. Need not be aligned or cleared.
  op      one enum flashattn_op of the plan.
  args    its sizes are read. May be NULL: enough for every call within the plan's maxima.
  bytes   out; 0 is possible.
INVALID_ARGUMENT: also when args is NULL and a maximum that matters is not set.
""",
    "flashattn_args_init": """\
int32_t flashattn_args_init(flashattn_args *args, uint32_t struct_size)

Zeroes the arguments of a call, sets struct_size, and asks for packed strides (-1) of every
tensor.
  args          out.
  struct_size   sizeof(flashattn_args) as the caller knows it, 4 to 4096.
INVALID_ARGUMENT: NULL, a size out of that range.
""",
    "flashattn_merge_args_init": """\
int32_t flashattn_merge_args_init(flashattn_merge_args *args, uint32_t struct_size)

Zeroes the arguments of flashattn_merge likewise; the caller sets the strides of part_o.
  args          out.
  struct_size   sizeof(flashattn_merge_args) as the caller knows it, 4 to 4096.
INVALID_ARGUMENT: NULL, a size out of that range.
""",
    "flashattn_quantize_args_init": """\
int32_t flashattn_quantize_args_init(flashattn_quantize_args *args, uint32_t struct_size)

Zeroes the arguments of flashattn_quantize and asks for packed strides likewise.
  args          out.
  struct_size   sizeof(flashattn_quantize_args) as the caller knows it, 4 to 4096.
INVALID_ARGUMENT: NULL, a size out of that range.
""",
    "flashattn_append_kv_args_init": """\
int32_t flashattn_append_kv_args_init(flashattn_append_kv_args *args, uint32_t struct_size)

Zeroes the arguments of flashattn_append_kv and asks for packed strides likewise.
  args          out.
  struct_size   sizeof(flashattn_append_kv_args) as the caller knows it, 4 to 4096.
INVALID_ARGUMENT: NULL, a size out of that range.
""",
    "flashattn_forward": """\
int32_t flashattn_forward(const flashattn_plan *plan, const flashattn_args *args, void *workspace,
    int64_t workspace_bytes, void *stream)

For each sequence, head and query, with the masks and the sequence's off of enum flashattn_mask:
    s    = scale * q_i . k_j ;  softcap: s = softcap * tanh(s / softcap)
    s   -= slope_h * |i + off - j| ;  s += bias[b, h, i, j]
    lse  = ln(sum over visible j of exp(s) [+ exp(sink_h)])
    o_i  = sum over visible j of keep(i, j) / (1 - dropout) * exp(s - lse) * v_j
(Dao et al. 2022, Dao 2023). Scores, softmax and sums are fp32. Results do not depend on the
magnitude or order of scores and biases, up to FLT_MAX, beyond the rounding of a score itself. A
row that sees one key only is that key's value, exactly; in F32 on a GPU, where a bias hides the
other keys, within 2^-23 of it. On Hopper many queries beside a cache of F8E4M3 are computed with
copies of the numbers meant, in the workspace, rounded to the type of q; those beyond its range
become its largest. Hopper rounds a cache of LATENT_KV to the type of q likewise; up to 32 rows,
query heads of a KV head times seqlen_q, have exact scores, elements of v within 2^-10, and weights
of fp16, in which those below 2^-25 of a row's largest are 0.
  workspace         device memory, exclusive to this call until it is done. May be NULL when 0
                    bytes are needed.
  workspace_bytes   at least flashattn_workspace_size for these sizes.
""",
    "flashattn_backward": """\
int32_t flashattn_backward(const flashattn_plan *plan, const flashattn_args *args,
    void *workspace, int64_t workspace_bytes, void *stream)

The gradients, with the scores recomputed from lse (Dao et al. 2022, algorithm 4):
    D_i  = dout_i . o_i - dlse_i ;  P = exp(s - lse) ;  dP = keep / (1 - dropout) * dout v^T
    dS   = P * (dP - D) ;  dbias = dS ;  dsink_h = - sum over b, i of exp(sink_h - lse_i) * D_i
    dv_j = sum over i of keep / (1 - dropout) * P dout_i
    dq, dk from dS through softcap and scale
dk and dv of a KV head sum over its query heads. All rows within a sequence's length are written.
For a part of a larger attention, give the o and lse that flashattn_merge wrote. The rounding of
an fp32 lse alone leaves a weight a relative error of up to |lse| * 2^-24, beside what rounding
the score does: where |lse| is 1024 or more, the largest score and the sum of the weights beside
it are computed again instead, unless lse counts keys that the call does not see; above 2^20 no
lse can tell that. F8E4M3 on a GPU: from copies of the numbers meant, in the workspace, in the
16-bit type of o, else of the gradients, else BF16.
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
    "flashattn_quantize": """\
int32_t flashattn_quantize(const flashattn_plan *plan, const flashattn_quantize_args *args,
    void *stream)

Makes 8-bit numbers of wider q, k and v: transform(x) times 1 / descale, rounded to nearest even, a
descale for each descale_block tokens of a head. The plan, whose dtype or dtype_kv is F8E4M3 or
whose dtype_kv is I8, gives device, heads, dims, layout and descale_block. Needs no workspace. CPU
and GPU write the same bits, but at times for the last one of k_mean and lse_shift, and of what
Hopper transforms from 16 bits, on tensor cores. GPU: one launch, and one before it with SMOOTH_K.
UNSUPPORTED: PAGED_KV, LATENT_KV.
""",
    "flashattn_append_kv": """\
int32_t flashattn_append_kv(const flashattn_plan *plan, const flashattn_append_kv_args *args,
    void *stream)

Appends new keys and values to a cache: token i of sequence b becomes row lens_kv[b] + i, dense,
VARLEN_KV or in pages. k is rotated before, and q in the same launch (rotary position embedding,
Su et al. 2021), with i counted from positions[b]:
    (x, y) = (x cos - y sin, x sin + y cos) for each pair
in fp32, every product and sum rounded by itself, so that all devices write the same bits. The
plan gives device, heads, dims, layout, page_size, types and descale_block. Needs no workspace.
Forward sees the new keys with lens_kv = lens_out. On a GPU tokens that have no room are left out;
the CPU refuses them. GPU: one launch, and a second one where lens_out is lens_kv and a sequence
has more new elements than one CTA moves. UNSUPPORTED: LATENT_KV.
""",
    "flashattn_dropout_mask": """\
int32_t flashattn_dropout_mask(const flashattn_plan *plan, const flashattn_args *args,
    uint8_t *keep, void *stream)

Writes which weights the plan's dropout keeps: 1 = kept, 0 = dropped. The numbers depend on
(seed, offset, b, h, i, j) only, not on device, tile or layout; i and j count from the start of a
sequence. Philox4x32-7 (Salmon et al. 2011) with key (seed low, seed high ^ offset high) and
counter ((j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, b * heads_q + h, offset low); its
word ((j >> 3) & 1) * 2 + ((i >> 3) & 1), low half for even j, high half for odd j, is u; kept
iff u >= round(65536 * dropout).
  args   only the sizes and the rng fields are read.
  keep   out, device memory: (batch, heads_q, seqlen_q, seqlen_kv) bytes.
""",
}
