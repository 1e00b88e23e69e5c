// Tiles of 8-bit, 16-bit or fp32 elements in shared memory, and their loads by cp.async.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda {

// Returns x, but hides its value from the compiler, so that expressions of the result are computed
// where they stand instead of being hoisted out of a loop and kept in registers.
template <class T>
__device__ __forceinline__ T no_hoist(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// kRows x kColumns elements of kSize bytes; rows are contiguous. 16-byte chunks are swizzled within
// every 128 bytes (chunk ^ row % 8; in rows of 64 bytes chunk ^ row / 2 % 4), so that neither
// ldmatrix nor row-wise stores have bank conflicts.
template <int kRows, int kColumns, int kSize_ = 2>
struct SmemTile {
  static constexpr int kHeight = kRows, kSize = kSize_, kRowBytes = kColumns * kSize;
  static constexpr bool kHalfLine = kRowBytes == 64;
  static_assert(kRowBytes % 128 == 0 || kHalfLine, "a row is four chunks or a multiple of eight");
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunks = kRowBytes / 16, kChunkElements = 16 / kSize;

  uint32_t base;  // shared-memory address, 128-byte aligned

  __device__ __forceinline__ uint32_t chunk(int row, int index) const {
    return base + row * kRowBytes + ((index ^ (kHalfLine ? row >> 1 & 3 : row & 7)) << 4);
  }

  __device__ __forceinline__ uint32_t element(int row, int column) const {
    return chunk(row, column / kChunkElements) + column % kChunkElements * kSize;
  }

  // The address `step` chunks behind that of chunk 0 or 1 of a row; step is even. It is one
  // instruction if step is a constant, so that the result need not be kept in a register.
  static __device__ __forceinline__ uint32_t advance(uint32_t address, int step) {
    return (address ^ ((step & 7) << 4)) + (step >> 3) * 128;
  }
};

// The rows (tokens) of one head of one sequence in global memory.
struct RowView {
  const char* base;
  int64_t row_bytes;
};

__device__ __forceinline__ char* tensor_row(const flashattn_tensor& t, int32_t size, int32_t b,
                                            int32_t h, int64_t i) {
  return static_cast<char*>(t.data) +
         (b * t.stride_batch + h * t.stride_head + i * t.stride_seq) * size;
}

// The rows of a head from row `first` on.
template <int kSize>
__device__ __forceinline__ RowView head_rows(const flashattn_tensor& t, int32_t b, int32_t h,
                                             int64_t first) {
  return {tensor_row(t, kSize, b, h, first), t.stride_seq * kSize};
}

// The rows of one head of a sequence in a paged KV cache.
struct PagedRowView : RowView {
  const int32_t* pages;
  int32_t page_size;
  int64_t page_bytes;
  int64_t page_limit;

  // Row i, which lies in `page`.
  __device__ __forceinline__ const char* row(int64_t page, int32_t i) const {
    // A page number out of range is clamped: the result is wrong, but no other memory is read.
    page = page < 0 ? 0 : page >= page_limit ? page_limit - 1 : page;
    return base + page * page_bytes + i % page_size * row_bytes;
  }
};

// Assigns the chunks of a tile to kThreads threads: each copies one column of chunks.
template <int kThreads, int kRows, class Tile>
struct TileCopy {
  static constexpr int kChunks = Tile::kChunks;
  static constexpr int kThreadsPerRow = kChunks <= 4     ? 4
                                        : kChunks <= 8   ? 8
                                        : kChunks <= 16  ? 16
                                        : kChunks <= 32  ? 32
                                        : kChunks <= 64  ? 64
                                        : kChunks <= 128 ? 128
                                                         : 256;
  static constexpr int kRowStep = kThreads / kThreadsPerRow;  // rows per step of all threads
  static constexpr int kSteps = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0 &&
                    (kRowStep % 8 == 0 || (8 % kRowStep == 0 && !Tile::kHalfLine)),
                "a step keeps the swizzle");
  static constexpr int kWarpRows =
      kThreadsPerRow < 32 ? 32 / kThreadsPerRow : 1;  // rows that a warp copies per step

  int chunk, row;  // position of the thread's chunk in its first step
  uint32_t to;     // shared-memory address of that chunk

  __device__ __forceinline__ explicit TileCopy(Tile tile) {
    const int thread = no_hoist(threadIdx.x);
    chunk = thread % kThreadsPerRow;
    row = thread / kThreadsPerRow;
    to = tile.chunk(row, chunk);
  }

  __device__ __forceinline__ bool has_chunk() const {
    return kThreadsPerRow == kChunks || chunk < kChunks;
  }

  // The address of the chunk of row + n * kRowStep. row < kRowStep, so the swizzle differs in the
  // bits of n * kRowStep only.
  __device__ __forceinline__ uint32_t address(int n) const {
    return (to ^ (n * kRowStep & 7) << 4) + n * kRowStep * Tile::kRowBytes;
  }
};

// Starts cp.async of a tile. row(r) returns the address of row r; null: zeros are stored. Columns
// from dim on are filled with zeros. The caller commits.
template <int kThreads, int kRows, int kColumns, int kSize, class RowOf>
__device__ __forceinline__ void load_tile(SmemTile<kRows, kColumns, kSize> tile, int dim,
                                          RowOf row) {
  const TileCopy<kThreads, kRows, decltype(tile)> copy(tile);
  if (!copy.has_chunk()) return;
  const bool inside = copy.chunk * tile.kChunkElements < dim;
#pragma unroll 2
  for (int n = 0; n < copy.kSteps; ++n) {
    const char* from = row(copy.row + n * copy.kRowStep);
    ptx::cp_async_16(copy.address(n), from + copy.chunk * 16, inside && from != nullptr);
  }
}

// load_tile() of rows [first, limit) of a view; rows past the limit are filled with zeros.
template <int kThreads, int kRows, int kColumns, int kSize>
__device__ __forceinline__ void load_tokens(SmemTile<kRows, kColumns, kSize> tile, int dim,
                                            const RowView& rows, int32_t first, int32_t limit) {
  const TileCopy<kThreads, kRows, decltype(tile)> copy(tile);
  if (!copy.has_chunk()) return;
  const int32_t count = copy.chunk * tile.kChunkElements < dim ? limit - first - copy.row : 0;
  const char* from =
      rows.base + static_cast<uint32_t>(first + copy.row) * rows.row_bytes + copy.chunk * 16;
#pragma unroll
  for (int n = 0; n < copy.kSteps; ++n, from += copy.kRowStep * rows.row_bytes) {
    ptx::cp_async_16(copy.address(n), from, n * copy.kRowStep < count);
  }
}

// Loads rows of a paged KV cache. The page of each row is looked up one tile ahead, by a lane of
// the warp that copies the row, into a word of shared memory that only this lane reads. So no load
// of a tile waits for a load of a page number.
template <int kThreads, class Tile>
struct PagedCopy {
  using Copy = TileCopy<kThreads, Tile::kHeight, Tile>;
  static constexpr int kWarpRows = Copy::kWarpRows;
  static_assert(Copy::kSteps * kWarpRows <= 32, "each lane looks up one row");

  // The address of the thread's page number, 4 bytes.
  static __device__ __forceinline__ uint32_t page_address(uint32_t smem_pages) {
    return smem_pages + no_hoist(threadIdx.x) * 4;
  }

  // The row of the tile whose page the lane looks up; kHeight or more: none.
  static __device__ __forceinline__ int row_of_lane() {
    const int thread = no_hoist(threadIdx.x), lane = thread % 32;
    return lane / kWarpRows * Copy::kRowStep + (thread - lane) / Copy::kThreadsPerRow +
           lane % kWarpRows;
  }

  // Starts cp.async of the page number. This cp.async group must be complete before load().
  static __device__ __forceinline__ void prefetch_page_index(uint32_t smem_pages,
                                                             const PagedRowView& rows,
                                                             int32_t first, int32_t limit) {
    const int own = row_of_lane();
    const bool valid = own < Tile::kHeight && first + own < limit;
    ptx::cp_async_4(page_address(smem_pages),
                    rows.pages + (valid ? (first + own) / rows.page_size : 0), valid);
  }

  // Starts cp.async of the tile, as load_tokens() does. Rows of negative page numbers, which hide
  // keys, become 0: no NaN meets their P.
  static __device__ __forceinline__ void load(Tile tile, uint32_t smem_pages, int dim,
                                              const PagedRowView& rows, int32_t first,
                                              int32_t limit) {
    const int32_t page = static_cast<int32_t>(ptx::load_shared(page_address(smem_pages)));
    const uint64_t own = reinterpret_cast<uint64_t>(rows.row(page, first + row_of_lane()));
    const Copy copy(tile);
    const int32_t count = copy.chunk * Tile::kChunkElements < dim ? limit - first - copy.row : 0;
    const uint32_t hidden =  // bit n * kWarpRows: this thread's n-th row is hidden
        __ballot_sync(~0u, page < 0) >> threadIdx.x % 32 / Copy::kThreadsPerRow;
    // Kernels with large heads have fewer registers to spare.
#pragma unroll(Copy::kThreadsPerRow > 16 ? 2 : 4)
    for (int n = 0; n < Copy::kSteps; ++n) {
      const int from = n * kWarpRows + threadIdx.x % 32 / Copy::kThreadsPerRow;
      const uint64_t high = __shfl_sync(~0u, static_cast<uint32_t>(own >> 32), from);
      const uint64_t row = high << 32 | __shfl_sync(~0u, static_cast<uint32_t>(own), from);
      if (!copy.has_chunk()) continue;
      ptx::cp_async_16(copy.address(n), reinterpret_cast<const char*>(row) + copy.chunk * 16,
                       n * Copy::kRowStep < count && !(hidden >> n * kWarpRows & 1));
    }
  }
};

// Zeros rows [max(first, 0), rows) of a tile: panels of 64 columns of 16 bits. The 128 threads of a
// warpgroup call it. A short loop: this is rare, and usual code jumps over it.
template <int kPanels>
__device__ __forceinline__ void clear_rows(uint32_t tile, int32_t rows, int32_t first) {
  const int32_t thread = no_hoist(threadIdx.x) % 128;
#pragma unroll 1
  for (int32_t r = max(first, 0) + thread / 8; r < rows; r += 16) {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      ptx::clear_shared_16(tile + (p * rows + r) * 128 + thread % 8 * 16);
    }
  }
}

}  // namespace flashattn::cuda
