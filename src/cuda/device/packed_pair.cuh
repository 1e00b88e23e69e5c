// Two neighbouring elements of a row, as mma operands and memory hold them: one word for 16-bit
// types, two for fp32.
#pragma once

#include <type_traits>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/device/smem_tile.cuh"

namespace flashattn::cuda {

template <class T>
struct PackedPair {
  uint32_t word;

  static __device__ __forceinline__ PackedPair of(float x, float y) { return {ptx::pack<T>(x, y)}; }
  static __device__ __forceinline__ PackedPair load_shared(uint32_t from) {
    return {ptx::load_shared(from)};
  }
  static __device__ __forceinline__ PackedPair load(const char* from) {
    return {*reinterpret_cast<const uint32_t*>(from)};
  }
  __device__ __forceinline__ void store_shared(uint32_t to) const { ptx::store_shared(to, word); }
  __device__ __forceinline__ void store_if(bool condition, char* to) const {
    ptx::store_if(condition, to, word);
  }
  __device__ __forceinline__ float2 to_float2() const { return ptx::unpack<T>(word); }
  // Each element, but 0 where the element of `other` is 0, even if it is NaN or infinite.
  __device__ __forceinline__ PackedPair zero_where_zero(PackedPair other) const {
    return {word & ptx::nonzero_mask(other.word)};
  }
};

template <>
struct PackedPair<float> {
  float2 pair;

  static __device__ __forceinline__ PackedPair of(float x, float y) { return {make_float2(x, y)}; }
  static __device__ __forceinline__ PackedPair load_shared(uint32_t from) {
    return {ptx::load_shared_pair(from)};
  }
  static __device__ __forceinline__ PackedPair load(const char* from) {
    return {*reinterpret_cast<const float2*>(from)};
  }
  __device__ __forceinline__ void store_shared(uint32_t to) const {
    ptx::store_shared_pair(to, pair);
  }
  __device__ __forceinline__ void store_if(bool condition, char* to) const {
    ptx::store_if(condition, reinterpret_cast<float*>(to), pair.x, pair.y);
  }
  __device__ __forceinline__ float2 to_float2() const { return pair; }
  __device__ __forceinline__ PackedPair zero_where_zero(PackedPair other) const {
    return of(other.pair.x == 0.0f ? 0.0f : pair.x, other.pair.y == 0.0f ? 0.0f : pair.y);
  }
};

// Transposes 4 x 4 words of the four lanes of a quad: word w of lane n becomes word n of lane w.
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = lane & step;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w & step) continue;
      const uint32_t received = __shfl_xor_sync(~0u, high ? words[w] : words[w + step], step);
      (high ? words[w] : words[w + step]) = received;
    }
  }
}

// Stores 32 columns of a row, of which each lane of a quad holds a pair in every 8. Columns from
// `columns`, a multiple of 8, on are not stored. Lanes exchange 16-bit elements, so that each
// stores 16 bytes.
template <class T>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> store_quad(
    const PackedPair<T> (&pairs)[4], char* to, int32_t columns, int lane) {
  uint32_t words[4] = {pairs[0].word, pairs[1].word, pairs[2].word, pairs[3].word};
  quad_transpose(words, lane);
  ptx::store_if(lane % 4 * 8 < columns, to + lane % 4 * 16, words);
}

__device__ __forceinline__ void store_quad(const PackedPair<float> (&pairs)[4], char* to,
                                           int32_t columns, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int32_t column = n * 8 + lane % 4 * 2;
    pairs[n].store_if(n * 8 < columns, to + column * 4);
  }
}

// Adds to 16 columns of a row in global memory: each lane of a quad holds a pair of the first 8 and
// a pair of the last 8. Columns from `columns`, a multiple of 8, on are not touched. With red.v4
// neighbour lanes exchange pairs first, which takes less time than twice as many red.v2.
__device__ __forceinline__ void red_add_columns(float* row, float2 first, float2 second,
                                                int32_t columns, int lane) {
  if constexpr (ptx::kHasRedAddV4) {
    const bool odd = lane & 1;
    const float2 kept = odd ? second : first, sent = odd ? first : second;
    const float2 received{__shfl_xor_sync(~0u, sent.x, 1), __shfl_xor_sync(~0u, sent.y, 1)};
    const float2 left = odd ? received : kept, right = odd ? kept : received;
    const int at = lane % 4 / 2 * 4 + lane % 2 * 8;
    if (at < columns) ptx::red_add_v4(row + at, left.x, left.y, right.x, right.y);
  } else {
    const int at = no_hoist(lane) % 4 * 2;  // registers are scarce
    if (columns > 0) ptx::red_add_v2(row + at, first.x, first.y);
    if (columns > 8) ptx::red_add_v2(row + at + 8, second.x, second.y);
  }
}

}  // namespace flashattn::cuda
