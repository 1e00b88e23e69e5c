// Transposes V of E4M3 to tiles of V^T, as the Hopper forward kernel loads them: rows are columns
// of V, 128 keys long, with the 128-byte swizzle. Keys past a sequence's last are 0. fwd_fp8.cuh
// has the order of keys.
#include <type_traits>

#include "core/seqlen_info.h"
#include "cuda/kernels/sm90/fp8_transpose_v.h"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

// Transposes 4 x 4 bytes: x[i] has four columns of key i, y[j] has column j of the four keys.
__device__ __forceinline__ void transpose_4x4(const uint32_t (&x)[4], uint32_t (&y)[4]) {
  const uint32_t low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
  const uint32_t low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
  y[0] = __byte_perm(low01, low23, 0x5410);
  y[1] = __byte_perm(low01, low23, 0x7632);
  y[2] = __byte_perm(high01, high23, 0x5410);
  y[3] = __byte_perm(high01, high23, 0x7632);
}

// Prepares the descales of tile n, whose index is `tile`; of tile 0 also the largest of V. All
// threads call it.
__device__ __forceinline__ void write_descales(const TransposeVParams& params, int32_t b,
                                               int32_t head, int32_t n, int64_t tile,
                                               int32_t keys) {
  const Inputs& in = params.args.inputs;
  const int32_t size = params.problem.descale_block;
  const auto of = [b, head](const flashattn_tensor& x, int32_t block) {
    if (x.data == nullptr) return 1.0f;
    return static_cast<const float*>(
        x.data)[b * x.stride_batch + head * x.stride_head + block * x.stride_seq];
  };
  float own = 0.0f;
  const int32_t blocks = static_cast<int32_t>(ceil_div(keys, size));
  for (int32_t x = static_cast<int32_t>(threadIdx.x); x < blocks; x += kThreads) {
    own = fmaxf(own, of(in.descale_v, x));
  }
  __shared__ int largest_of_warp[kThreads / 32];
  const int of_warp = __reduce_max_sync(~0u, __float_as_int(own));
  if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float largest = 0.0f;
#pragma unroll
  for (const int x : largest_of_warp) largest = fmaxf(largest, __int_as_float(x));
  for (int half = 0; half < 2; ++half) {
    const int32_t key = min(n * kFp8TileKv + half * (kFp8TileKv / 2), keys - 1);
    const float v = of(in.descale_v, key / size);
    params.half_descales[2 * tile + half] = {
        of(in.descale_k, key / size),
        largest == 0.0f ? 0.0f : fmaxf(log2f(v / largest), kLeastLog2V)};
  }
  if (n == 0) params.largest_descale_v[b * params.problem.heads_kv + head] = largest;
}

template <int kDim, bool kBlockDescales>
__global__ void __launch_bounds__(kThreads)
    transpose_v(const __grid_constant__ TransposeVParams params) {
  // A thread has 16 keys of four columns.
  constexpr int kWords = kTransposeVColumns / 4, kChunks = kFp8TileKv / 16;
  static_assert(kWords * kChunks == kThreads, "one pass");
  ptx::griddep_launch_dependents();  // the forward kernel waits for all of this one
  __shared__ uint4 image[kTransposeVColumns * kChunks];  // chunks of 16 keys
  const Problem& problem = params.problem;
  const Inputs& in = params.args.inputs;
  // Neighbours in memory are read at about the same time: columns, then heads, then keys.
  constexpr int32_t kParts = kDim / kTransposeVColumns;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) % kParts * kTransposeVColumns;
  const int32_t tile_head = static_cast<int32_t>(blockIdx.x) / kParts;
  const int32_t head = tile_head % problem.heads_kv;
  const int32_t n = tile_head / problem.heads_kv % params.tiles;
  const int32_t b = tile_head / problem.heads_kv / params.tiles;
  const int32_t first = n * kFp8TileKv;
  const SeqlenInfo sequence = seqlen_info(problem, params.args.shape, in, b);
  if (first >= sequence.len.kv) return;
  const bool paged = problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  const bool varlen = problem.layout & FLASHATTN_LAYOUT_VARLEN_KV;
  const int word = static_cast<int>(threadIdx.x) % kWords,
            chunk = static_cast<int>(threadIdx.x) / kWords;
  const int32_t column = first_column + word * 4;
  const char* const base = static_cast<const char*>(in.v.data) + head * in.v.stride_head +
                           (varlen || paged ? 0 : b * in.v.stride_batch) + column;
  const auto four_columns = [&](int32_t key) -> uint32_t {
    if (key >= sequence.len.kv || column >= problem.dim_v) return 0;
    int64_t at;
    if (paged) {
      const int32_t page_idx = key / problem.page_size;
      const int32_t page = in.page_table[b * in.page_table_stride + page_idx];
      // A page that does not exist reads as 0, as TMA reads that of K.
      if (page < 0 || page >= in.pages) return 0;
      at = page * in.v.stride_batch + (key - page_idx * problem.page_size) * in.v.stride_seq;
    } else {
      at = (sequence.offset_kv + key) * in.v.stride_seq;
    }
    return *reinterpret_cast<const uint32_t*>(base + at);
  };
  uint32_t keys[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) keys[i] = four_columns(first + chunk * 16 + i);
  uint32_t columns[4][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t four[4] = {keys[2 * c], keys[2 * c + 1], keys[8 + 2 * c], keys[9 + 2 * c]};
    uint32_t transposed[4];
    transpose_4x4(four, transposed);
#pragma unroll
    for (int i = 0; i < 4; ++i) columns[i][c] = transposed[i];
  }
  // Eight lanes store the same column of eight words at a time, and load eight chunks of a column:
  // with this swizzle both are in different banks.
  const auto place = [](int of_column, int of_chunk) {
    return of_column * kChunks + (of_chunk ^ of_column / 4 % 8);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    image[place(word * 4 + i, chunk)] =
        make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
  }
  __syncthreads();
  const HeadTiles tiles = HeadTiles::of_keys(problem, params.args.shape, kFp8TileKv);
  const int64_t tile = (tiles.first(sequence.offset_kv, b) + n) * problem.heads_kv + head;
  if (kBlockDescales && first_column == 0)
    write_descales(params, b, head, n,
                   head * tiles.count() + tiles.first(sequence.offset_kv, b) + n, sequence.len.kv);
  uint4* const to = reinterpret_cast<uint4*>(params.to + (tile * kDim + first_column) * kFp8TileKv);
#pragma unroll
  for (int x = static_cast<int>(threadIdx.x); x < kTransposeVColumns * kChunks; x += kThreads) {
    to[x] = image[place(x / kChunks, x % kChunks ^ x / kChunks % 8)];
  }
}

template <bool kBlockDescales>
TransposeVKernel kernel_of(int32_t dim) {
  return {kThreads, dim == 64    ? transpose_v<64, kBlockDescales>
                    : dim == 128 ? transpose_v<128, kBlockDescales>
                                 : transpose_v<256, kBlockDescales>};
}

}  // namespace

TransposeVKernel transpose_v_kernel(int32_t dim, bool block_descales) {
  return block_descales ? kernel_of<true>(dim) : kernel_of<false>(dim);
}

}  // namespace flashattn::cuda::sm90
