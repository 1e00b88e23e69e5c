// Loads tiles of a paged KV cache with few instructions: each warp copies neighbouring rows, and if
// pages allow it, runs of rows that lie in one page have one page number and one address.
#pragma once

#include "core/page_division.h"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

// As in PagedCopy, each lane looks up its page number ahead, into a word of shared memory that only
// it reads.
template <int kThreads, class Tile>
struct PageRunCopy {
  static constexpr int kChunks = Tile::kChunks;
  static_assert((kChunks & (kChunks - 1)) == 0 && kChunks <= 32, "a warp copies whole rows");
  static constexpr int kStepRows = 32 / kChunks;  // rows that a warp copies per step
  static constexpr int kWarpRows = Tile::kHeight / (kThreads / 32);
  static_assert(kWarpRows % kStepRows == 0 && kWarpRows <= 32, "each lane looks up one row");
  static constexpr int kSteps = kWarpRows / kStepRows;
  static_assert(kSteps == 1 || kWarpRows % 8 == 0, "a step keeps the swizzle");
  static constexpr int kRun = kWarpRows < 16 ? kWarpRows : 16;

  // How many consecutive rows share the page number that a lane looks up.
  static __device__ __forceinline__ int run(int32_t page_size) {
    return page_size % kRun == 0 ? kRun : 1;
  }
  static __device__ __forceinline__ int first_row() {
    return no_hoist(threadIdx.x) / 32 * kWarpRows;
  }

  static __device__ __forceinline__ uint32_t page_address(uint32_t smem_pages) {
    return smem_pages + no_hoist(threadIdx.x) * 4;
  }

  // Starts cp.async of the page number. This cp.async group must be complete before load().
  static __device__ __forceinline__ void prefetch_page_index(uint32_t smem_pages,
                                                             const PagedRowView& rows,
                                                             PageDivision division, int32_t first,
                                                             int32_t limit) {
    const int own = static_cast<int>(no_hoist(threadIdx.x) % 32) * run(rows.page_size);
    const int32_t i = first + first_row() + own;
    const bool valid = own < kWarpRows && i < limit;
    const int32_t entry = division.place(valid ? i : 0, rows.page_size).entry;
    ptx::cp_async_4(page_address(smem_pages), rows.pages + entry, valid);
  }

  // Starts cp.async of the tile's rows [first, limit). Rows of negative page numbers, which hide
  // keys, become 0.
  static __device__ __forceinline__ void load(Tile tile, uint32_t smem_pages, int dim,
                                              const PagedRowView& rows, PageDivision division,
                                              int32_t first, int32_t limit) {
    const int lane = static_cast<int>(no_hoist(threadIdx.x) % 32),
              rows_a_page = run(rows.page_size);
    const int32_t own = first + first_row() + lane * rows_a_page;
    const int32_t page = static_cast<int32_t>(ptx::load_shared(page_address(smem_pages)));
    const int64_t clamped = page >= rows.page_limit ? rows.page_limit - 1 : page;
    const char* address = rows.base + clamped * rows.page_bytes +
                          division.place(own, rows.page_size).row * rows.row_bytes;
    const uint64_t own_row = page < 0 ? 0 : reinterpret_cast<uint64_t>(address);
    const int chunk = lane % kChunks, row = lane / kChunks;
    const int32_t count =
        chunk * Tile::kChunkElements < dim ? limit - first - first_row() - row : 0;
    const uint32_t to = tile.chunk(first_row() + row, chunk);
    const auto address_of = [&](int lane) {
      const uint64_t high = __shfl_sync(~0u, static_cast<uint32_t>(own_row >> 32), lane);
      return high << 32 | __shfl_sync(~0u, static_cast<uint32_t>(own_row), lane);
    };
    const auto copy = [&](int n, const char* from, uint64_t page_row) {
      ptx::cp_async_16((to ^ (n * kStepRows & 7) << 4) + n * kStepRows * Tile::kRowBytes,
                       from + chunk * 16, n * kStepRows < count && page_row != 0);
    };
    if (rows_a_page == 1) {
#pragma unroll 2
      for (int n = 0; n < kSteps; ++n) {
        const uint64_t page_row = address_of(n * kStepRows + row);
        copy(n, reinterpret_cast<const char*>(page_row), page_row);
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kSteps; n += kRun / kStepRows) {
      const uint64_t page_row = address_of(n * kStepRows / kRun);
      const char* from = reinterpret_cast<const char*>(page_row) + row * rows.row_bytes;
#pragma unroll
      for (int step = n; step < n + kRun / kStepRows; ++step, from += kStepRows * rows.row_bytes) {
        copy(step, from, page_row);
      }
    }
  }
};

}  // namespace flashattn::cuda
