/* libflashattn: FlashAttention, forward and backward, behind a C ABI.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Exact tiled attention: O = softmax(scale * Q K^T + bias) V and its gradients, in memory linear in
 * the sequence length, on the CPU and on NVIDIA GPUs, through the same calls.
 *
 *     enum { SIZE = 2 * 77 * 8 * 64 };           // (batch, seq, head, dim), the last index fastest
 *     static float q[SIZE], k[SIZE], v[SIZE], o[SIZE];
 *     flashattn_desc desc = {.struct_size = sizeof desc};  // every default is zero
 *     desc.dtype = FLASHATTN_DTYPE_F32;
 *     desc.heads_q = 8;
 *     desc.dim_qk = 64;
 *     desc.mask = FLASHATTN_MASK_CAUSAL;
 *     flashattn_plan *plan = NULL;
 *     int32_t status = flashattn_plan_create(&desc, &plan, NULL);
 *     flashattn_args args;
 *     if (!status) status = flashattn_args_init(&args, sizeof args);  // zero, strides packed
 *     args.batch = 2, args.seqlen_q = 77, args.seqlen_kv = 77;
 *     args.q.data = q, args.k.data = k, args.v.data = v, args.o.data = o;
 *     int64_t bytes = 0;
 *     if (!status) status = flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &args, &bytes);
 *     void *workspace = malloc((size_t)bytes);
 *     if (!status) status = flashattn_forward(plan, &args, workspace, bytes, NULL);
 *     if (status) puts(flashattn_last_error(NULL, NULL));  // field, value, limit, device, remedy
 *     free(workspace);
 *     flashattn_plan_destroy(plan);
 *
 * Conventions, once for everything below
 *
 *   Zero      A structure that is zero but for struct_size asks for nothing unusual. Fields that
 *             must be set are marked "required". Unknown bits and enumerators are refused.
 *   Growth    Structures grow at their end only. A caller of version 0.2.0 or later may pass a
 *             smaller struct_size than this library knows: the rest counts as zero. A larger one,
 *             up to 4096, is accepted if the part that this library does not know is zero. A
 *             structure of 0.1 is refused: its flashattn_desc had 184 bytes, a size that no later one
 *             may have.
 *   Status    Functions that can fail return an enum flashattn_status. A call that failed changed
 *             nothing: arguments are checked before anything is computed, launched or written. The
 *             message of flashattn_last_error names field, value, limit, device and remedy. A
 *             flashattn_error of the caller's receives the same, for runtimes that move tasks from
 *             thread to thread. Besides what is listed at each function, all can return
 *             FLASHATTN_ERROR_INTERNAL. Nothing prints, aborts, throws or exits.
 *   Text      const char pointers are UTF-8, end in a zero byte and belong to the library. They are
 *             never NULL unless that is said, and live as long as the process unless that is said.
 *   Memory    The library keeps no pointer past a call, except that work enqueued on a GPU reads
 *             and writes what it was given. Host memory is allocated in check and plan_create only
 *             (threads of the CPU backend: in the first call that needs them), device memory never.
 *             "Device memory" below means memory that the plan's device can address: host memory
 *             for the CPU.
 *   Threads   Every function may be called from any thread at any time. A plan is immutable: any
 *             number of threads and streams may run it at once, each with a workspace of its own.
 *             Only flashattn_plan_destroy must not overlap a use of the same plan.
 *   Arrays    Index letters: b sequence, h head, i query, j key, c element of a head. Offsets and
 *             strides count elements. The comment of an array starts with its shape, in the order
 *             of packed memory, the last index fastest; its type; and when it is needed:
 *             "(batch, seqlen_q, heads_q, dim_qk); dtype; required".
 *   Strides   stride_batch, stride_head and stride_seq go with the indices batch, heads, and
 *             seqlen, tokens or blocks. An index behind these (dim, keys, pages, words) is
 *             contiguous. Every stride is taken as it stands: 0 repeats (inputs only), -1 asks for
 *             that of the packed array without the indices that repeat. Ignored are strides of
 *             extents of 0 and 1, of indices that the array does not have, and of tensors without
 *             data.
 *   Overlap   What is written must share no memory with anything else of a call; interleaved arrays
 *             (packed QKV) do not. That is decided exactly where two arrays step by the same
 *             strides or one of them has no gaps. Where strides differ, a search of bounded length
 *             finds most overlaps; what it does not find is accepted, with undefined results.
 *   Lengths   cu_seqlens, lens, starts and page_table lie in device memory. The CPU reads them and
 *             refuses impossible values. A GPU does not: values out of range count as the nearest
 *             in range, and no value makes it touch memory outside the arrays and the workspace.
 *             Results are undefined then, of other sequences, too.
 *   Empty     A query with no visible key yields o = 0 and lse = -inf (with a sink: lse = sink).
 *             Rows past a sequence's length are never read into a result and never written.
 */
#ifndef FLASHATTN_H
#define FLASHATTN_H

#include <stddef.h>
#include <stdint.h>

#define FLASHATTN_VERSION_MAJOR 0
#define FLASHATTN_VERSION_MINOR 2
#define FLASHATTN_VERSION_PATCH 0

/* FLASHATTN_STATIC: the program links the archive. FLASHATTN_BUILD: the library itself is built. */
#if defined(FLASHATTN_STATIC)
#define FLASHATTN_API
#elif defined(_WIN32) && defined(FLASHATTN_BUILD)
#define FLASHATTN_API __declspec(dllexport)
#elif defined(_WIN32)
#define FLASHATTN_API __declspec(dllimport)
#elif defined(__GNUC__) || defined(__clang__)
#define FLASHATTN_API __attribute__((visibility("default")))
#else
#define FLASHATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- declarations begin: no preprocessor line from here to the end marker ---- */

/* What a call says of itself. Stored and returned as int32_t. */
enum flashattn_status {
  FLASHATTN_OK = 0,
  /* A field, pointer or size that no library of this version could honour on any device. */
  FLASHATTN_ERROR_INVALID_ARGUMENT = 1,
  /* A meaningful request that no backend of this build honours on this device. */
  FLASHATTN_ERROR_UNSUPPORTED = 2,
  /* The workspace is smaller than flashattn_workspace_size says. */
  FLASHATTN_ERROR_WORKSPACE = 3,
  /* Host memory ran out. */
  FLASHATTN_ERROR_OUT_OF_MEMORY = 4,
  /* The device or its driver reported an error, or the wrong device is current. */
  FLASHATTN_ERROR_DEVICE = 5,
  /* struct_size is that of a structure of 0.1, above 4096, or larger than known with a part that is
   * not zero: a newer header. */
  FLASHATTN_ERROR_VERSION = 6,
  /* A fault of the library itself. Please report it with the message. */
  FLASHATTN_ERROR_INTERNAL = 7
};

/* Why a request was refused: the second half of flashattn_last_error. Stored as int32_t. */
enum flashattn_reason {
  FLASHATTN_REASON_NONE = 0,
  /* The library was built without CUDA. */
  FLASHATTN_REASON_NO_CUDA_BUILD = 1,
  /* No such device on this machine. */
  FLASHATTN_REASON_NO_DEVICE = 2,
  FLASHATTN_REASON_DRIVER_TOO_OLD = 3,
  /* The GPU is older than the kernels need. */
  FLASHATTN_REASON_ARCH = 4,
  FLASHATTN_REASON_DTYPE = 5,
  /* dtype and one of dtype_kv, dtype_o and dtype_bias do not go together. */
  FLASHATTN_REASON_DTYPE_MIX = 6,
  FLASHATTN_REASON_HEAD_DIM_MULTIPLE = 7,
  FLASHATTN_REASON_HEAD_DIM_MAX = 8,
  FLASHATTN_REASON_HEAD_DIM_PAIR = 9,
  /* heads_q is no multiple of heads_kv. */
  FLASHATTN_REASON_HEAD_RATIO = 10,
  FLASHATTN_REASON_LAYOUT = 11,
  FLASHATTN_REASON_PAGE_SIZE = 12,
  FLASHATTN_REASON_MASK_COMBINATION = 13,
  FLASHATTN_REASON_BIAS = 14,
  FLASHATTN_REASON_DROPOUT = 15,
  FLASHATTN_REASON_SINK = 16,
  FLASHATTN_REASON_SOFTCAP = 17,
  FLASHATTN_REASON_DETERMINISM = 18,
  FLASHATTN_REASON_WORKSPACE_LIMIT = 19,
  FLASHATTN_REASON_SHARED_MEMORY = 20,
  FLASHATTN_REASON_CPU_ISA = 21,
  /* The backend was switched off when the library was built. */
  FLASHATTN_REASON_NOT_IN_THIS_BUILD = 22,
  /* The plan was not made for this operation: see flashattn_desc.ops. */
  FLASHATTN_REASON_OP = 23,
  /* A required pointer is NULL, or one that the plan does not use is not. */
  FLASHATTN_REASON_NULL_POINTER = 24,
  FLASHATTN_REASON_MISALIGNED = 25,
  FLASHATTN_REASON_OVERLAP = 26,
  /* A size is zero, negative, above the plan's maximum, or overflows. */
  FLASHATTN_REASON_SIZE = 27,
  FLASHATTN_REASON_STRIDE = 28,
  /* An enumerator or bit this library does not know, or a value outside its range. */
  FLASHATTN_REASON_VALUE = 29,
  FLASHATTN_REASON_RESERVED = 30,
  FLASHATTN_REASON_STRUCT_SIZE = 31,
  /* cu_seqlens, lens, starts or a page table hold an impossible value (CPU only: read there). */
  FLASHATTN_REASON_LENGTHS = 32,
  FLASHATTN_REASON_STREAM = 33
};

enum flashattn_device {
  FLASHATTN_DEVICE_CPU = 0,
  FLASHATTN_DEVICE_CUDA = 1
};

/* Operations, as bits. */
enum flashattn_op {
  FLASHATTN_OP_FORWARD = 1,
  FLASHATTN_OP_BACKWARD = 2
};

enum flashattn_dtype {
  /* Not set: the field's default. */
  FLASHATTN_DTYPE_DEFAULT = 0,
  FLASHATTN_DTYPE_F32 = 1,
  FLASHATTN_DTYPE_F16 = 2,
  FLASHATTN_DTYPE_BF16 = 3,
  /* 8-bit float, 4 exponent bits, no infinity (OCP E4M3). */
  FLASHATTN_DTYPE_F8E4M3 = 4,
  /* A byte: a boolean mask, 0 = hidden, anything else = visible. */
  FLASHATTN_DTYPE_U8 = 5,
  /* A signed byte: an element of a quantised cache, for dtype_kv alone. CPU only. */
  FLASHATTN_DTYPE_I8 = 6
};

/* How sequences lie in memory, as bits. None: dense (batch, seq, head, dim). */
enum flashattn_layout {
  /* Q, O and their gradients are (total_q, head, dim); cu_seqlens_q says where sequences start. */
  FLASHATTN_LAYOUT_VARLEN_Q = 1,
  /* K, V and their gradients are (total_kv, head, dim); cu_seqlens_kv says where they start. */
  FLASHATTN_LAYOUT_VARLEN_KV = 2,
  /* K and V are pools of pages (page, page_size, head, dim); page_table says which. Forward only,
   * not together with VARLEN_KV. */
  FLASHATTN_LAYOUT_PAGED_KV = 4,
  /* The quantised cache of latent attention (DeepSeek-AI 2024). A key is its value and dim_qk - dim_v
   * elements more, which rotate: v holds those of dtype_kv, F8E4M3 or I8, descale_latent a descale
   * for each descale_dim of them, and k only those behind, in the type of q. So lies a record of 656
   * bytes a token, 512 of v, 4 descales, 64 of k in 16 bits: three arrays with stride_seq = 656, 164
   * and 328. GPUs want these strides to be the same in bytes. Forward only; flashattn_quantize and
   * flashattn_append_kv refuse it. */
  FLASHATTN_LAYOUT_LATENT_KV = 8
};

/* Which keys a query sees, as bits: all must agree. With Sq, Sk the lengths of the sequence and
 * off = Sk - Sq (TOP_LEFT: 0), query i sees key j when 0 <= j < Sk and */
enum flashattn_mask {
  /* j <= i + off */
  FLASHATTN_MASK_CAUSAL = 1,
  /* i + off - window_left <= j <= i + off + window_right; a side of -1 is open */
  FLASHATTN_MASK_WINDOW = 2,
  /* floor((i + off) / chunk) == floor(j / chunk) */
  FLASHATTN_MASK_CHUNK = 4,
  /* Aligns i and j at the start of the sequence instead of at its end, for the masks above and
   * for ALiBi. */
  FLASHATTN_MASK_TOP_LEFT = 8,
  /* block_mask[b, h, i / block_q, j / block_kv] != 0. A block of which the other masks hide nothing
   * needs no other number: kernels tell from positions. */
  FLASHATTN_MASK_BLOCKS = 16,
  /* Of the last `tree` keys, j >= Sk - tree, query i sees those whose bit j - (Sk - tree) of
   * tree_bits[b, i] is set: drafted tokens, each with its own past. CAUSAL, WINDOW and CHUNK then
   * hold for the keys before only, BLOCKS and a boolean mask for all. A sequence with fewer keys
   * than `tree` has the last bits. Forward only. */
  FLASHATTN_MASK_TREE = 32,
  /* page_table[b, j / page_size] >= 0: a negative page number hides its keys from all queries, and
   * they need no memory. Where every query is a sequence of its own (batch * seqlen_q sequences of
   * one query) and page_size is 1, the page table is a list of tokens for each query, and -1 fills
   * it: sparse attention by token indices (DeepSeek-AI 2025). Only with PAGED_KV. */
  FLASHATTN_MASK_PAGES = 64,
  /* With BLOCKS: block_index lists the blocks that are on, in the place of block_mask, as the block
   * masks of FlexAttention and block-sparse rows do. */
  FLASHATTN_MASK_BLOCK_LISTS = 128,
  /* With BLOCKS: j % block_kv < block_lens[b, h, j / block_kv]: the keys of a block that count, as of
   * tiles of video that are not full. */
  FLASHATTN_MASK_BLOCK_LENS = 256
};

/* What is added to the scores, as bits. */
enum flashattn_bias {
  /* - alibi_slopes[h] * |i + off - j|  (Press et al. 2022) */
  FLASHATTN_BIAS_ALIBI = 1,
  /* + bias[b, h, i, j]; with dtype_bias U8 a boolean mask. */
  FLASHATTN_BIAS_DENSE = 2
};

/* Further inputs and outputs, as bits. */
enum flashattn_feature {
  /* Forward writes lse. */
  FLASHATTN_FEATURE_LSE = 1,
  /* A learned logit per query head that takes part in the softmax and has no value vector. */
  FLASHATTN_FEATURE_SINK = 2,
  /* Backward adds the gradient that arrives at lse. */
  FLASHATTN_FEATURE_DLSE = 4,
  /* Backward writes the gradient of the dense bias. */
  FLASHATTN_FEATURE_DBIAS = 8,
  /* Backward writes the gradient of the sink. */
  FLASHATTN_FEATURE_DSINK = 16
};

/* Which results must repeat bit for bit; of a NaN, only that it is one. Each level includes the one
 * before. */
enum flashattn_determinism {
  /* Whatever is fastest. On the CPU: always BATCH_INVARIANT. */
  FLASHATTN_DETERMINISM_DEFAULT = 0,
  /* The same call on the same device gives the same bits. */
  FLASHATTN_DETERMINISM_RUN_TO_RUN = 1,
  /* A sequence's bits do not depend on what else is in the batch. */
  FLASHATTN_DETERMINISM_BATCH_INVARIANT = 2
};

/* Transforms of q and k by flashattn_quantize before it rounds them, as bits. Neither changes a
 * score in exact arithmetic but by what lse_shift says; both make the rounding errors of scores
 * smaller. */
enum flashattn_transform {
  /* k minus its mean over the tokens of its sequence: the same for all keys of a query, which the
   * softmax does not see. Not with a plan that has softcap or SINK (Zhang et al. 2024). */
  FLASHATTN_TRANSFORM_SMOOTH_K = 1,
  /* q and k times diag(signs) H / sqrt(n): an orthogonal matrix that spreads outliers over n
   * elements, H being the Hadamard matrix of the largest power of two n that divides dim_qk; n is
   * dim_qk or at least 32 (Shah et al. 2024, incoherent processing). */
  FLASHATTN_TRANSFORM_ROTATE = 2
};

/* Which elements of a head flashattn_append_kv rotates together: pair c of the first rotary_dim. */
enum flashattn_rotary {
  /* Elements c and c + rotary_dim / 2 (GPT-NeoX, Llama). */
  FLASHATTN_ROTARY_HALVES = 0,
  /* Elements 2 c and 2 c + 1 (Su et al. 2021). */
  FLASHATTN_ROTARY_INTERLEAVED = 1
};

enum flashattn_log_level {
  FLASHATTN_LOG_OFF = 0,
  /* The message of every call that fails. */
  FLASHATTN_LOG_ERROR = 1,
  /* Also: the kernel that each plan chose, and why. */
  FLASHATTN_LOG_INFO = 2,
  /* Also: every backend that refused, with its reason. */
  FLASHATTN_LOG_DEBUG = 3
};

/* An error, as flashattn_last_error reports it, in memory of the caller's. Written by calls that
 * fail, and left alone by others. */
typedef struct flashattn_error {
  /* Required: sizeof(flashattn_error). */
  uint32_t struct_size;
  /* enum flashattn_status. */
  int32_t status;
  /* enum flashattn_reason. */
  int32_t reason;
  int32_t reserved;
  /* The structure member it is about, "dim_qk", "q.stride_seq"; "" when there is none. */
  char field[64];
  /* Field, value, limit, device and remedy, in words. */
  char message[640];
} flashattn_error;

/* A descriptor says what is computed, for many calls: lengths come with each call. */
typedef struct flashattn_desc {
  /* Required: sizeof(flashattn_desc). */
  uint32_t struct_size;
  /* enum flashattn_device. 0: the CPU. */
  int32_t device;
  /* The device's number among its kind, from 0. CUDA: the runtime's ordinal. */
  int32_t device_index;
  /* enum flashattn_op bits. 0: forward only. */
  uint32_t ops;
  /* Required: enum flashattn_dtype of q, and of k and v unless dtype_kv is set. F8E4M3: elements
   * times a descale are the numbers meant; see flashattn_args. */
  int32_t dtype;
  /* The type of k and v. 0: as dtype. F8E4M3 beside another dtype, and I8 beside any, mean a
   * quantised cache, whose elements times a descale are the numbers meant. */
  int32_t dtype_kv;
  /* The type of o and dout. 0: as dtype. F32 is possible beside all inputs. With 8-bit inputs also
   * F16, BF16 and, unless ops has BACKWARD, F8E4M3. */
  int32_t dtype_o;
  /* Required: query heads, >= 1. */
  int32_t heads_q;
  /* Key and value heads; heads_q must be a multiple. 0: as heads_q. Query head h reads KV head
   * h / (heads_q / heads_kv). */
  int32_t heads_kv;
  /* Required: elements of a query and a key, >= 1. */
  int32_t dim_qk;
  /* Elements of a value. 0: as dim_qk. */
  int32_t dim_v;
  /* enum flashattn_layout bits. */
  uint32_t layout;
  /* Tokens a page, >= 1. Only with PAGED_KV, 0 otherwise. */
  int32_t page_size;
  /* enum flashattn_mask bits. */
  uint32_t mask;
  /* Keys visible to the left and right of the diagonal; -1: open. Only with WINDOW. */
  int32_t window_left;
  int32_t window_right;
  /* Tokens a chunk, >= 1. Only with CHUNK. */
  int32_t chunk;
  /* Queries and keys a block of the block mask, >= 1. Only with BLOCKS. */
  int32_t block_q;
  int32_t block_kv;
  /* Keys at the end of each sequence that are drafted tokens, 1 to 256. Only with TREE. */
  int32_t tree;
  /* enum flashattn_bias bits. */
  uint32_t bias;
  /* Of the dense bias: F32, F16, BF16 or U8. 0: as dtype. Only with DENSE. */
  int32_t dtype_bias;
  /* enum flashattn_feature bits. */
  uint32_t features;
  /* enum flashattn_determinism. */
  int32_t determinism;
  /* Factor of the scores. 0: 1 / sqrt(dim_qk). Of magnitude below 2^127. */
  float scale;
  /* Scores become softcap * tanh(score / softcap). 0: off. Below 2^127, as is scale / softcap. */
  float softcap;
  /* Probability with which a weight is dropped, [0, 1), rounded to steps of 1/65536. 0: off. What
   * rounds to 0 or to 1 is refused. */
  float dropout;
  /* Tokens that share a descale, >= 1. 0: all of a sequence. Only with F8E4M3 or I8, and not with
   * LATENT_KV, where each token has its own. */
  int32_t descale_block;
  /* Splits of a sequence's keys in the forward pass (split-KV), at most 4096. 0: the library
   * chooses, for short queries only. 1: never. */
  int32_t splits;
  /* Maxima: no call may pass them. 0: none. They let flashattn_workspace_size answer for all calls
   * at once, and help to choose a kernel. */
  int32_t max_batch;
  int32_t max_seqlen_q;
  int32_t max_seqlen_kv;
  /* GPU: streaming multiprocessors to use at the most. 0: all. */
  int32_t multiprocessors;
  /* CPU: threads to use at the most; more than 1024 are as 1024. 0: all cores that the process may
   * use (affinity and cgroup quota). 1: the caller's only. The library's threads are started when
   * first needed, kept, and shared by all calls; where the system gives fewer, those do the work. A
   * child made by fork has as many. */
  int32_t threads;
  /* Maxima, as above, for VARLEN layouts: tokens of all sequences together. */
  int64_t max_total_q;
  int64_t max_total_kv;
  /* Bytes of workspace that calls within the maxima may need. Kernels that need more are not
   * chosen, and flashattn_plan_info says so. The plan is refused when none fits. 0: no limit. */
  int64_t workspace_limit;
  /* The type of dq, dk and dv. 0: as dtype or, where that is F8E4M3, as dtype_o. F32, F16 or BF16
   * beside 8-bit inputs, which have the range of no gradient; otherwise as dtype. */
  int32_t dtype_grad;
  /* Elements of a value that share a descale, >= 1; 128 in DeepSeek's cache. Only with LATENT_KV. */
  int32_t descale_dim;
} flashattn_desc;

/* An array with indices b, i, h, c: see "Strides" at the top. This structure is final. */
typedef struct flashattn_tensor {
  /* Device memory, aligned to its element. May be NULL when the array has no element. */
  void *data;
  /* Elements from one sequence, head, token to the next; 0 repeats, -1: packed. VARLEN: there is
   * one sequence, of all tokens. PAGED_KV: stride_batch goes from page to page, stride_seq from
   * token to token inside a page. */
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seq;
} flashattn_tensor;

/* One task of a parallel loop. */
typedef void (*flashattn_task_fn)(void *context, int32_t index);

/* A thread pool of the caller's: runs task(context, index) once for each index in [0, count), on
 * any threads, in any order, at once or one after another, and returns when all have returned. */
typedef void (*flashattn_parallel_fn)(void *user, int32_t count, flashattn_task_fn task,
                                      void *context);

/* The arguments of a call: sizes, inputs, outputs, gradients. Backward takes what forward was
 * called with, and the gradients. flashattn_workspace_size and flashattn_plan_info read the sizes
 * only. Pointers are to device memory. What the plan has no use for must be NULL or 0; what an
 * operation has no use for is ignored. Neither batch * seqlen nor total, times heads_q times the
 * larger head dimension, may be more than 2^46. */
typedef struct flashattn_args {
  /* Required: sizeof(flashattn_args). */
  uint32_t struct_size;
  /* Sequences. 0: nothing to do. */
  int32_t batch;
  /* Queries and keys of the longest sequence, below 2^31 - 65535. Dense: of every sequence, unless
   * lens says less. Where lengths lie on the device, upper bounds. */
  int32_t seqlen_q;
  int32_t seqlen_kv;
  /* VARLEN_Q, VARLEN_KV: the rows of q, and of k and v, all sequences together. 0 otherwise. */
  int64_t total_q;
  int64_t total_kv;

  /* (batch, seqlen_q, heads_q, dim_qk); dtype; required. VARLEN_Q: (total_q, heads_q, dim_qk). */
  flashattn_tensor q;
  /* (batch, seqlen_kv, heads_kv, dim_qk); dtype_kv; required. VARLEN_KV: (total_kv, heads_kv,
   * dim_qk). PAGED_KV: (pages, page_size, heads_kv, dim_qk). LATENT_KV: of dtype, and dim_qk - dim_v
   * elements in the place of dim_qk. */
  flashattn_tensor k;
  /* (batch, seqlen_kv, heads_kv, dim_v); dtype_kv; required. VARLEN_KV: (total_kv, heads_kv,
   * dim_v). PAGED_KV: (pages, page_size, heads_kv, dim_v). LATENT_KV: also the first elements of the
   * keys. */
  flashattn_tensor v;
  /* (batch + 1); i32; required with VARLEN_Q. Sequence b holds rows [cu[b], cu[b + 1]). */
  const int32_t *cu_seqlens_q;
  /* (batch + 1); i32; required with VARLEN_KV. */
  const int32_t *cu_seqlens_kv;
  /* (batch); i32; optional. Tokens in use of each sequence, at most its capacity. */
  const int32_t *lens_q;
  /* (batch); i32; optional. */
  const int32_t *lens_kv;
  /* (batch); i32; optional. Left padding: keys before starts_kv[b] do not exist. Key positions, of
   * masks, ALiBi, bias and dropout, count from there, and Sk is the length that is left. Rows of dk
   * and dv before are not written. Not with PAGED_KV. */
  const int32_t *starts_kv;
  /* (batch, ceil(seqlen_kv / page_size)); i32; required with PAGED_KV. Page numbers; with
   * PAGES a negative one hides the keys of its page. */
  flashattn_tensor page_table;
  /* Pages in the pool. Required with PAGED_KV. */
  int64_t pages;
  /* (batch, heads_q, seqlen_q, seqlen_kv); dtype_bias; required with DENSE. */
  flashattn_tensor bias;
  /* (batch, heads_q); f32; required with ALIBI. */
  flashattn_tensor alibi_slopes;
  /* (heads_q); f32; required with SINK. Natural logits. */
  const float *sink;
  /* (batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)); u8; required with
   * BLOCKS. Not with BLOCK_LISTS. */
  flashattn_tensor block_mask;
  /* (batch, seqlen_q, ceil(tree / 32)); u32; required with TREE. Bit n % 32 of word n / 32, the
   * least being bit 0, is of key Sk - tree + n; bits from `tree` on are ignored. Also with VARLEN_Q
   * a row is a query of its sequence. */
  flashattn_tensor tree_bits;
  /* (batch, heads_kv, ceil(seqlen_q / descale_block)); f32; optional with dtype F8E4M3. A factor of
   * q, at least 0, which the query heads of a KV head share. Blocks count i from the start of a
   * sequence, those of k and v count j. NULL: 1. */
  flashattn_tensor descale_q;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with F8E4M3 or I8. A factor
   * of k, at least 0. NULL: 1. */
  flashattn_tensor descale_k;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with F8E4M3 or I8. A factor
   * of v, at least 0. NULL: 1. */
  flashattn_tensor descale_v;
  /* Random numbers of the dropout: see flashattn_dropout_mask. */
  uint64_t rng_seed;
  uint64_t rng_offset;
  /* (2); u64; optional with dropout. {seed, offset}, to which the two above are added: CUDA graphs
   * can be replayed with new numbers. */
  const uint64_t *rng_device;

  /* (batch, seqlen_q, heads_q, dim_v); dtype_o; required. Forward writes it, backward reads it.
   * VARLEN_Q: (total_q, heads_q, dim_v). */
  flashattn_tensor o;
  /* (batch, heads_q, seqlen_q); f32; required with LSE and for backward. Natural logarithm.
   * Forward writes it, and refuses it without LSE; backward reads it. VARLEN_Q: (heads_q,
   * total_q). */
  float *lse;

  /* (batch, seqlen_q, heads_q, dim_v); dtype_o; required for backward. The gradient that arrives at
   * o. */
  flashattn_tensor dout;
  /* (batch, heads_q, seqlen_q); f32; required with DLSE. The gradient that arrives at lse. */
  const float *dlse;
  /* (batch, seqlen_q, heads_q, dim_qk); dtype_grad; required for backward. Written, not added to.
   * 8 bits: of the numbers meant, which have their descale, as are dk and dv. */
  flashattn_tensor dq;
  /* (batch, seqlen_kv, heads_kv, dim_qk); dtype_grad; required for backward. Written. */
  flashattn_tensor dk;
  /* (batch, seqlen_kv, heads_kv, dim_v); dtype_grad; required for backward. Written. */
  flashattn_tensor dv;
  /* (batch, heads_q, seqlen_q, seqlen_kv); f32; required with DBIAS. Written. A stride of 0: summed
   * over that index; summed over sequences, it is written as large as the sizes say, zeros where
   * nothing adds. */
  flashattn_tensor dbias;
  /* (heads_q); f32; required with DSINK. Written. */
  float *dsink;

  /* CPU, optional: runs the call's tasks, instead of the library's own threads. */
  flashattn_parallel_fn parallel;
  /* Handed to parallel. NULL without it. */
  void *parallel_user;
  /* Optional, host memory: receives the error of a call that fails. */
  flashattn_error *error;

  /* (batch, heads_q); f32; optional with dtype_o F8E4M3. o is written as o * scale_o, rounded to
   * nearest even; what is larger than 448 becomes 448. NULL: 1. */
  flashattn_tensor scale_o;
  /* (batch, heads_q); f32; optional with F8E4M3 or I8. Forward writes it: the largest |o|, before
   * scale_o and rounding, for the scale of a later call; 0 where there are no queries. A stride of 0:
   * the largest over that index. On a GPU scores beyond 2^20 may raise it by some percent. Not with
   * LATENT_KV. */
  flashattn_tensor amax_o;
  /* (batch, seqlen_kv, heads_kv, ceil(dim_v / descale_dim)); f32; required with LATENT_KV. A factor of
   * v, at least 0. It lies as v does: VARLEN_KV: (total_kv, heads_kv, ceil(dim_v / descale_dim)).
   * PAGED_KV: (pages, page_size, heads_kv, ceil(dim_v / descale_dim)). */
  flashattn_tensor descale_latent;
  /* (batch, heads_q, ceil(seqlen_q / block_q), block_entries); i32; required with BLOCK_LISTS. For
   * each block of queries a row that has the numbers of the blocks of keys that it sees, in any
   * order. What is no number of a block, as -1 is not, counts for nothing. */
  flashattn_tensor block_index;
  /* (batch, heads_q, ceil(seqlen_q / block_q)); i32; optional with BLOCK_LISTS. The first entry of
   * block_index's row that counts. NULL: 0. Of block-sparse rows it is indptr, and a stride_seq of 0
   * lets them all be in one row of block_index. */
  flashattn_tensor block_begin;
  /* (batch, heads_q, ceil(seqlen_q / block_q)); i32; optional with BLOCK_LISTS. The end of the entries
   * that count: how many there are where block_begin is NULL, indptr + 1 of block-sparse rows. NULL:
   * block_entries. */
  flashattn_tensor block_end;
  /* Entries of a row of block_index. 0 without BLOCK_LISTS. */
  int64_t block_entries;
  /* (batch, heads_q, ceil(seqlen_kv / block_kv)); i32; required with BLOCK_LENS. Keys of a block that
   * count, from its first on: at least 0, at most block_kv. */
  flashattn_tensor block_lens;
} flashattn_args;

typedef struct flashattn_merge_args {
  /* Required: sizeof(flashattn_merge_args). */
  uint32_t struct_size;
  /* Required: how many partial results, >= 1. */
  int32_t parts;
  /* As in flashattn_args. VARLEN_Q: only total_q is read; others: only batch and seqlen_q. */
  int32_t batch;
  int32_t seqlen_q;
  int64_t total_q;
  /* (batch, seqlen_q, heads_q, dim_v); dtype_part; required. Host array (parts) of such tensors. */
  const flashattn_tensor *part_o;
  /* (batch, heads_q, seqlen_q); f32; required. Host array (parts) of pointers to such arrays in
   * device memory. */
  const float *const *part_lse;
  /* Of the partial o: dtype_o of the plan or F32. 0: dtype_o. */
  int32_t dtype_part;
  int32_t reserved;
  /* (batch, seqlen_q, heads_q, dim_v); the plan's dtype_o; required. Written. */
  flashattn_tensor o;
  /* (batch, heads_q, seqlen_q); f32; optional. Written. */
  float *lse;
  /* As in flashattn_args. */
  flashattn_parallel_fn parallel;
  void *parallel_user;
  flashattn_error *error;
} flashattn_merge_args;

/* The arguments of flashattn_quantize. What is given to forward afterwards: q_out as q, k_out as k,
 * v_out as v, and the descales. An array whose input is NULL is left out, and so is its output. */
typedef struct flashattn_quantize_args {
  /* Required: sizeof(flashattn_quantize_args). */
  uint32_t struct_size;
  /* As in flashattn_args. */
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int64_t total_q;
  int64_t total_kv;
  /* Required: of q, k and v: F32, F16 or BF16. */
  int32_t dtype;
  /* enum flashattn_transform bits. */
  uint32_t transform;
  /* Seed of the signs of ROTATE, which q and k share: element c is negated where bit c % 32 of word
   * c / 32 % 4 is set of Philox4x32-7 with key (seed low, seed high) and counter (c / 128, 0, 0,
   * 0). 0 otherwise. */
  uint64_t rotation_seed;
  /* As in flashattn_args. Rows past a length are neither read nor written. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_kv;
  const int32_t *lens_q;
  const int32_t *lens_kv;
  const int32_t *starts_kv;

  /* (batch, seqlen_q, heads_q, dim_qk); dtype; optional. */
  flashattn_tensor q;
  /* (batch, seqlen_kv, heads_kv, dim_qk); dtype; optional. */
  flashattn_tensor k;
  /* (batch, seqlen_kv, heads_kv, dim_v); dtype; optional. */
  flashattn_tensor v;
  /* (batch, seqlen_q, heads_q, dim_qk); the plan's dtype; required with q. Written. Where that is
   * not F8E4M3, beside a cache, q is only rotated. */
  flashattn_tensor q_out;
  /* (batch, seqlen_kv, heads_kv, dim_qk); the plan's dtype_kv; required with k. Written. */
  flashattn_tensor k_out;
  /* (batch, seqlen_kv, heads_kv, dim_v); the plan's dtype_kv; required with v. Written. */
  flashattn_tensor v_out;
  /* (batch, heads_kv, ceil(seqlen_q / descale_block)); f32; required with q in F8E4M3. Written: the
   * largest magnitude of the block, of the query heads that share the KV head, divided by 448; 1
   * where that is 0. Infinities, which become 448, and NaN, which stays, do not count. I8: by 127,
   * which infinities become; a NaN becomes 0. Elements are rounded to nearest even. */
  flashattn_tensor descale_q;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; required with k. Written likewise. */
  flashattn_tensor descale_k;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; required with v. Written likewise. */
  flashattn_tensor descale_v;
  /* (batch, heads_kv, dim_qk); f32; required with SMOOTH_K. Written: the mean of k. */
  flashattn_tensor k_mean;
  /* (batch, heads_q, seqlen_q); f32; optional with q, k and SMOOTH_K. Written, as lse lies: scale *
   * q_i . k_mean, which is to be added to an lse of forward to make it that of k itself. Backward
   * takes the lse without it. */
  float *lse_shift;

  /* As in flashattn_args. */
  flashattn_parallel_fn parallel;
  void *parallel_user;
  flashattn_error *error;
} flashattn_quantize_args;

/* The arguments of flashattn_append_kv. Queries and new keys are the same tokens: seqlen_q, total_q,
 * cu_seqlens_q and lens_q are of both. An array whose input is NULL is left out, and so is its
 * output. */
typedef struct flashattn_append_kv_args {
  /* Required: sizeof(flashattn_append_kv_args). */
  uint32_t struct_size;
  /* As in flashattn_args. seqlen_q: new tokens of the longest sequence. seqlen_kv and total_kv: rows
   * of the cache, those behind the last token included. */
  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_kv;
  int64_t total_q;
  int64_t total_kv;
  /* The type of q, k and v: the plan's dtype; where that is F8E4M3, F32, F16 or BF16. 0: the
   * plan's. */
  int32_t dtype;
  /* enum flashattn_rotary. */
  int32_t rotary;
  /* Elements of a head of q and k that are rotated, from the first; even, at most dim_qk and 512. 0:
   * none. */
  int32_t rotary_dim;
  /* Rows of rotary_cos and rotary_sin. */
  int32_t rotary_positions;
  /* Of rotary_cos and rotary_sin: F32, F16 or BF16. 0: F32. */
  int32_t dtype_rotary;
  /* Without tables pair c of position p turns by the angle p * rotary_base^(-2 c / rotary_dim), at
   * least 1; usually 10000. 0 with tables. */
  float rotary_base;
  /* As in flashattn_args. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_kv;
  /* As in flashattn_args. New tokens past these are neither read nor written. */
  const int32_t *lens_q;
  /* (batch); i32; required. Tokens in the cache before the call, left padding included. */
  const int32_t *lens_kv;
  /* As in flashattn_args. */
  const int32_t *starts_kv;
  /* (batch); i32; optional. The position of each sequence's first new token, for the rotation.
   * NULL: lens_kv, less starts_kv. */
  const int32_t *positions;
  /* (batch); i32; optional with k or v. Written: lens_kv plus the new tokens, as forward needs it.
   * May be lens_kv itself, which is then incremented. */
  int32_t *lens_out;
  /* As in flashattn_args. Only entries of pages that are written are used. */
  flashattn_tensor page_table;
  int64_t pages;

  /* (batch, seqlen_q, heads_q, dim_qk); dtype; optional with rotary_dim. VARLEN_Q: (total_q, heads_q,
   * dim_qk). */
  flashattn_tensor q;
  /* (batch, seqlen_q, heads_kv, dim_qk); dtype; optional. VARLEN_Q: (total_q, heads_kv, dim_qk). */
  flashattn_tensor k;
  /* (batch, seqlen_q, heads_kv, dim_v); dtype; optional. VARLEN_Q: (total_q, heads_kv, dim_v). */
  flashattn_tensor v;
  /* (batch, seqlen_q, heads_q, dim_qk); dtype; required with q. Written: q rotated. May be q itself,
   * with the same strides. */
  flashattn_tensor q_out;
  /* (batch, seqlen_kv, heads_kv, dim_qk); the plan's dtype_kv; required with k. Written: rows
   * lens_kv[b] and later. VARLEN_KV: (total_kv, heads_kv, dim_qk). PAGED_KV: (pages, page_size,
   * heads_kv, dim_qk). */
  flashattn_tensor k_cache;
  /* (batch, seqlen_kv, heads_kv, dim_v); the plan's dtype_kv; required with v. Written likewise. */
  flashattn_tensor v_cache;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with k and a cache of F8E4M3
   * or I8, required with update_descales. Above 0: k times 1 / descale_k is rounded to nearest even,
   * and 448 beyond; I8: 127 beyond, and a NaN becomes 0. NULL: 1. */
  flashattn_tensor descale_k;
  /* (batch, heads_kv, ceil(seqlen_kv / descale_block)); f32; optional with v and a cache of F8E4M3
   * or I8. Likewise. */
  flashattn_tensor descale_v;
  /* (rotary_positions, rotary_dim / 2); dtype_rotary; optional with rotary_dim. Row p is of position
   * p. */
  flashattn_tensor rotary_cos;
  /* (rotary_positions, rotary_dim / 2); dtype_rotary; required with rotary_cos. */
  flashattn_tensor rotary_sin;

  /* As in flashattn_args. */
  flashattn_parallel_fn parallel;
  void *parallel_user;
  flashattn_error *error;
  /* 1: descale_k and descale_v are made for the new tokens, and written. A block that held no token
   * gets the largest magnitude of its new ones, divided by 448 (I8: 127), with descale_block > 1 the
   * next power of two. In a block that held some the descale grows where a new magnitude needs it,
   * and the elements that it held are rounded again: its pages must be of this sequence alone.
   * Needs an 8-bit cache and descale_block >= 1. 0: descales are given. */
  int32_t update_descales;
  int32_t reserved;
} flashattn_append_kv_args;

/* A device, as flashattn_device_info describes it. */
typedef struct flashattn_device_properties {
  /* Required: sizeof(flashattn_device_properties). */
  uint32_t struct_size;
  /* GPU: streaming multiprocessors. CPU: 0. */
  int32_t multiprocessors;
  /* CPU: threads that a plan with threads = 0 uses. GPU: 0. */
  int32_t threads;
  /* GPU: compute capability, 90 for 9.0. CPU: 0. */
  int32_t compute_capability;
  /* "AMD EPYC 9354", "NVIDIA H200". */
  const char *name;
  /* The best kernels this build has for it: "avx512_bf16", "sm90". */
  const char *isa;
  /* GPU: bytes of shared memory that a CTA may use. CPU: 0. */
  int32_t shared_memory;
  /* Bytes of L2 cache. CPU: of a core. */
  int32_t l2_cache;
  /* Bytes of memory. */
  int64_t memory;
} flashattn_device_properties;

/* What a plan will do, as flashattn_plan_info describes it. */
typedef struct flashattn_plan_properties {
  /* Required: sizeof(flashattn_plan_properties). */
  uint32_t struct_size;
  /* Queries and keys of a tile. */
  int32_t tile_q;
  int32_t tile_kv;
  /* Tiles in flight; 1: none ahead. */
  int32_t stages;
  /* CPU: threads at the most. GPU: threads of a CTA. */
  int32_t threads;
  /* GPU: registers of a thread. CPU: 0. */
  int32_t registers;
  /* GPU: bytes of shared memory of a CTA. CPU: 0. */
  int32_t shared_memory;
  /* CPU: bytes of workspace that a thread keeps to itself. GPU: 0. */
  int32_t scratch;
  /* Splits of the longest sequence's keys for these sizes. */
  int32_t splits;
  int32_t reserved;
  /* "cpu", "sm90". */
  const char *backend;
  /* The kernel's name. Lives as long as the plan, as do the next two. */
  const char *kernel;
  /* Instructions it is made of: "avx512_bf16". */
  const char *isa;
  /* Message: why this kernel. */
  const char *why;
  /* For the sizes asked about: arithmetic of the visible pairs, 2 for a multiply-add: 2 (dim_qk +
   * dim_v) a pair forward, 2.5 times that backward. Block masks, lens and bias count as visible. */
  int64_t flops;
  /* Least bytes to move: every input read once, every output written once. */
  int64_t bytes;
  /* flashattn_workspace_size. */
  int64_t workspace;
} flashattn_plan_properties;

/* A plan: a descriptor checked, with a kernel chosen. Opaque. */
typedef struct flashattn_plan flashattn_plan;

/* Receives a line of the log. Called from any thread that is inside a library call; must not call
 * the library. message lives for the call only. */
typedef void (*flashattn_log_fn)(void *user, int32_t level, const char *message);

/* ---- The library ---- */

/* The version of the library that runs: 10000 * major + 100 * minor + patch. */
FLASHATTN_API int32_t flashattn_version(void);

/* The version as text: "0.2.0". */
FLASHATTN_API const char *flashattn_version_string(void);

/* One line: version, compiler, instruction sets and GPU architectures in this build. */
FLASHATTN_API const char *flashattn_build_info(void);

/* The name of an enum flashattn_status, "FLASHATTN_OK"; "unknown status" for any other number. */
FLASHATTN_API const char *flashattn_status_name(int32_t status);

/* The message of the last call of this thread that failed; "" when none did. Successful calls
 * leave it alone. It lives until the next call of this thread fails, and so does the field.
 *   reason   out, may be NULL: enum flashattn_reason.
 *   field    out, may be NULL: the structure member it is about, "dim_qk", "q.stride_seq"; "" when
 *            there is none. */
FLASHATTN_API const char *flashattn_last_error(int32_t *reason, const char **field);

/* Sends log lines to a callback, for the whole process.
 *   level      enum flashattn_log_level.
 *   callback   may be NULL: off.
 *   user       handed to the callback, may be NULL.
 * INVALID_ARGUMENT: unknown level. */
FLASHATTN_API int32_t flashattn_set_log(int32_t level, flashattn_log_fn callback, void *user);

/* How many devices of a kind there are. 0 where the build or the machine has none.
 *   device   enum flashattn_device.
 *   count    out.
 * INVALID_ARGUMENT: unknown kind, NULL. */
FLASHATTN_API int32_t flashattn_device_count(int32_t device, int32_t *count);

/* Describes a device.
 *   device       enum flashattn_device.
 *   index        from 0.
 *   properties   in: struct_size; out: the rest.
 * INVALID_ARGUMENT, VERSION; UNSUPPORTED: NO_CUDA_BUILD, NO_DEVICE; DEVICE. */
FLASHATTN_API int32_t flashattn_device_info(int32_t device, int32_t index,
                                            flashattn_device_properties *properties);

/* ---- Plans ---- */

/* Zeroes a descriptor and sets its struct_size.
 *   desc          out.
 *   struct_size   sizeof(flashattn_desc) as the caller knows it, 4 to 4096.
 * INVALID_ARGUMENT: NULL, a size out of that range. */
FLASHATTN_API int32_t flashattn_desc_init(flashattn_desc *desc, uint32_t struct_size);

/* Whether flashattn_plan_create would succeed; if not, flashattn_last_error says why. Makes a plan
 * and frees it.
 *   error   out, may be NULL.
 * INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY. */
FLASHATTN_API int32_t flashattn_check(const flashattn_desc *desc, flashattn_error *error);

/* Checks the descriptor, chooses the kernels and does everything that is slow. The choice depends
 * on the descriptor, the device and the library's version, and on two environment variables for
 * tests, read once: FLASHATTN_BACKEND asks for a GPU backend (sm80, sm90), FLASHATTN_CPU_ISA for an
 * instruction set.
 *   desc    may be freed afterwards.
 *   plan    out: to be freed by flashattn_plan_destroy. Untouched on failure.
 *   error   out, may be NULL.
 * INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY. */
FLASHATTN_API int32_t flashattn_plan_create(const flashattn_desc *desc, flashattn_plan **plan,
                                            flashattn_error *error);

/* Frees a plan; NULL is fine. Work already enqueued on a stream is not disturbed. */
FLASHATTN_API void flashattn_plan_destroy(flashattn_plan *plan);

/* The descriptor of a plan with every default resolved: heads_kv, dim_v, types, scale.
 *   desc   in: struct_size; out: the rest.
 * INVALID_ARGUMENT, VERSION. */
FLASHATTN_API int32_t flashattn_plan_desc(const flashattn_plan *plan, flashattn_desc *desc);

/* Says which kernel an operation uses and what it costs.
 *   op           one enum flashattn_op of the plan.
 *   args         its sizes are read. May be NULL: the plan's maxima; what depends on a maximum that
 *                is not set is then 0.
 *   properties   in: struct_size; out: the rest.
 * INVALID_ARGUMENT, VERSION. */
FLASHATTN_API int32_t flashattn_plan_info(const flashattn_plan *plan, uint32_t op,
                                          const flashattn_args *args,
                                          flashattn_plan_properties *properties);

/* Bytes of workspace that an operation needs: linear in the sequence length, never smaller for
 * larger sizes, known before any pointer exists. Need not be aligned or cleared.
 *   op      one enum flashattn_op of the plan.
 *   args    its sizes are read. May be NULL: enough for every call within the plan's maxima.
 *   bytes   out; 0 is possible.
 * INVALID_ARGUMENT: also when args is NULL and a maximum that matters is not set. */
FLASHATTN_API int32_t flashattn_workspace_size(const flashattn_plan *plan, uint32_t op,
                                               const flashattn_args *args, int64_t *bytes);

/* ---- Running ----
 *
 * On the CPU the result is there when the call returns, and stream must be NULL. On a GPU the work
 * is enqueued on the stream (a cudaStream_t; NULL: the default stream) and the call returns; it
 * never synchronises, allocates or reads device memory, so that every call can be captured in a
 * CUDA graph. They return INVALID_ARGUMENT, VERSION, WORKSPACE and DEVICE, and UNSUPPORTED where
 * pointers, strides or sizes are such as no kernel of the plan takes. */

/* Zeroes the arguments of a call, sets struct_size, and asks for packed strides (-1) of every
 * tensor.
 *   args          out.
 *   struct_size   sizeof(flashattn_args) as the caller knows it, 4 to 4096.
 * INVALID_ARGUMENT: NULL, a size out of that range. */
FLASHATTN_API int32_t flashattn_args_init(flashattn_args *args, uint32_t struct_size);

/* Zeroes the arguments of flashattn_merge likewise; the caller sets the strides of part_o.
 *   args          out.
 *   struct_size   sizeof(flashattn_merge_args) as the caller knows it, 4 to 4096.
 * INVALID_ARGUMENT: NULL, a size out of that range. */
FLASHATTN_API int32_t flashattn_merge_args_init(flashattn_merge_args *args, uint32_t struct_size);

/* Zeroes the arguments of flashattn_quantize and asks for packed strides likewise.
 *   args          out.
 *   struct_size   sizeof(flashattn_quantize_args) as the caller knows it, 4 to 4096.
 * INVALID_ARGUMENT: NULL, a size out of that range. */
FLASHATTN_API int32_t flashattn_quantize_args_init(flashattn_quantize_args *args,
                                                   uint32_t struct_size);

/* Zeroes the arguments of flashattn_append_kv and asks for packed strides likewise.
 *   args          out.
 *   struct_size   sizeof(flashattn_append_kv_args) as the caller knows it, 4 to 4096.
 * INVALID_ARGUMENT: NULL, a size out of that range. */
FLASHATTN_API int32_t flashattn_append_kv_args_init(flashattn_append_kv_args *args,
                                                    uint32_t struct_size);

/* For each sequence, head and query, with the masks and the sequence's off of enum flashattn_mask:
 *     s    = scale * q_i . k_j ;  softcap: s = softcap * tanh(s / softcap)
 *     s   -= slope_h * |i + off - j| ;  s += bias[b, h, i, j]
 *     lse  = ln(sum over visible j of exp(s) [+ exp(sink_h)])
 *     o_i  = sum over visible j of keep(i, j) / (1 - dropout) * exp(s - lse) * v_j
 * (Dao et al. 2022, Dao 2023). Scores, softmax and sums are fp32. Results do not depend on the
 * magnitude or order of scores and biases, up to FLT_MAX, beyond the rounding of a score itself. A
 * row that sees one key only is that key's value, exactly; in F32 on a GPU, where a bias hides the
 * other keys, within 2^-23 of it. On Hopper many queries beside a cache of F8E4M3 are computed with
 * copies of the numbers meant, in the workspace, rounded to the type of q; those beyond its range
 * become its largest. Hopper rounds a cache of LATENT_KV to the type of q likewise; up to 32 rows,
 * query heads of a KV head times seqlen_q, have exact scores, elements of v within 2^-10, and weights
 * of fp16, in which those below 2^-25 of a row's largest are 0.
 *   workspace         device memory, exclusive to this call until it is done. May be NULL when 0
 *                     bytes are needed.
 *   workspace_bytes   at least flashattn_workspace_size for these sizes. */
FLASHATTN_API int32_t flashattn_forward(const flashattn_plan *plan, const flashattn_args *args,
                                        void *workspace, int64_t workspace_bytes, void *stream);

/* The gradients, with the scores recomputed from lse (Dao et al. 2022, algorithm 4):
 *     D_i  = dout_i . o_i - dlse_i ;  P = exp(s - lse) ;  dP = keep / (1 - dropout) * dout v^T
 *     dS   = P * (dP - D) ;  dbias = dS ;  dsink_h = - sum over b, i of exp(sink_h - lse_i) * D_i
 *     dv_j = sum over i of keep / (1 - dropout) * P dout_i
 *     dq, dk from dS through softcap and scale
 * dk and dv of a KV head sum over its query heads. All rows within a sequence's length are written.
 * For a part of a larger attention, give the o and lse that flashattn_merge wrote. The rounding of
 * an fp32 lse alone leaves a weight a relative error of up to |lse| * 2^-24, beside what rounding
 * the score does: where |lse| is 1024 or more, the largest score and the sum of the weights beside
 * it are computed again instead, unless lse counts keys that the call does not see; above 2^20 no
 * lse can tell that. F8E4M3 on a GPU: from copies of the numbers meant, in the workspace, in the
 * 16-bit type of o, else of the gradients, else BF16. */
FLASHATTN_API int32_t flashattn_backward(const flashattn_plan *plan, const flashattn_args *args,
                                         void *workspace, int64_t workspace_bytes, void *stream);

/* Merges partial results over disjoint sets of keys into the whole: lse = ln(sum of exp(lse_p)),
 * o = sum of exp(lse_p - lse) o_p; parts with lse = -inf count nothing. For ring or cascade
 * attention. A sink must be part of one partial result only. Needs no workspace; the plan gives
 * device, heads_q, dim_v, dtype_o and whether queries are VARLEN. o and lse may be those of a part
 * with the same strides and type. Rows are merged whatever lens says: give the parts defined
 * contents. */
FLASHATTN_API int32_t flashattn_merge(const flashattn_plan *plan, const flashattn_merge_args *args,
                                      void *stream);

/* Makes 8-bit numbers of wider q, k and v: transform(x) times 1 / descale, rounded to nearest even, a
 * descale for each descale_block tokens of a head. The plan, whose dtype or dtype_kv is F8E4M3 or
 * whose dtype_kv is I8, gives device, heads, dims, layout and descale_block. Needs no workspace. CPU
 * and GPU write the same bits, but at times for the last one of k_mean and lse_shift, and of what
 * Hopper transforms from 16 bits, on tensor cores. GPU: one launch, and one before it with SMOOTH_K.
 * UNSUPPORTED: PAGED_KV, LATENT_KV. */
FLASHATTN_API int32_t flashattn_quantize(const flashattn_plan *plan,
                                         const flashattn_quantize_args *args, void *stream);

/* Appends new keys and values to a cache: token i of sequence b becomes row lens_kv[b] + i, dense,
 * VARLEN_KV or in pages. k is rotated before, and q in the same launch (rotary position embedding,
 * Su et al. 2021), with i counted from positions[b]:
 *     (x, y) = (x cos - y sin, x sin + y cos) for each pair
 * in fp32, every product and sum rounded by itself, so that all devices write the same bits. The
 * plan gives device, heads, dims, layout, page_size, types and descale_block. Needs no workspace.
 * Forward sees the new keys with lens_kv = lens_out. On a GPU tokens that have no room are left out;
 * the CPU refuses them. GPU: one launch, and a second one where lens_out is lens_kv and a sequence
 * has more new elements than one CTA moves. UNSUPPORTED: LATENT_KV. */
FLASHATTN_API int32_t flashattn_append_kv(const flashattn_plan *plan,
                                          const flashattn_append_kv_args *args, void *stream);

/* Writes which weights the plan's dropout keeps: 1 = kept, 0 = dropped. The numbers depend on
 * (seed, offset, b, h, i, j) only, not on device, tile or layout; i and j count from the start of a
 * sequence. Philox4x32-7 (Salmon et al. 2011) with key (seed low, seed high ^ offset high) and
 * counter ((j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, b * heads_q + h, offset low); its
 * word ((j >> 3) & 1) * 2 + ((i >> 3) & 1), low half for even j, high half for odd j, is u; kept
 * iff u >= round(65536 * dropout).
 *   args   only the sizes and the rng fields are read.
 *   keep   out, device memory: (batch, heads_q, seqlen_q, seqlen_kv) bytes. */
FLASHATTN_API int32_t flashattn_dropout_mask(const flashattn_plan *plan, const flashattn_args *args,
                                             uint8_t *keep, void *stream);

/* ---- declarations end ---- */

#ifdef __cplusplus
}
#endif

#endif
