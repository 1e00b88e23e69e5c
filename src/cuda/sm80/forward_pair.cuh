// Two warps that share 32 rows of a forward pass of fp32, so that each number of K and V is read
// and split half as often, by a warp that multiplies it with both strips. Each sums over half of
// the head dimension for the scores and owns half of O's columns; in between each has all scores of
// the strip that is its own. They hand over sums, then weights, always from lane to lane, through
// 16 bytes a lane and 8 keys: what a warp leaves there its partner reads and then overwrites with
// its answer, so the only wait of their own is the one for weights.
#pragma once

#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda::sm80 {

// kGroups: of 8 keys, of a tile. Scores are [strip][8 keys][4], the own strip first.
template <int kGroups>
struct PairExchange {
  // Of a warp: scores, numbers handed over, numbers kept.
  static constexpr int kBytes = 32 * 16 * (kGroups + 2);

  uint32_t own, partner;  // the lane's 16 bytes of the warp's first group and of its partner's
  int32_t barrier;        // the pair's

  __device__ __forceinline__ PairExchange(uint32_t base, int warp, int lane)
      : own(base + warp * kBytes + lane * 16),
        partner(base + (warp ^ 1) * kBytes + lane * 16),
        barrier(1 + warp / 2) {}

  // The partner's strip of sums over this warp's half, for it.
  template <class Scores>
  __device__ __forceinline__ void hand_over_sums(const Scores& s) const {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) put(own + n * 512, s[1][n]);
  }

  // The own strip's from the partner, once all warps have handed over.
  template <class Scores>
  __device__ __forceinline__ void add_sums(Scores& s) const {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float x[4];
      take(x, partner + n * 512);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] += x[e];
    }
  }

  // The own strip's weights, for the partner.
  template <class Scores>
  __device__ __forceinline__ void hand_over_weights(const Scores& s) const {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) put(partner + n * 512, s[0][n]);
  }

  // Four numbers of the lane to the partner, its in return; then its weights are here too.
  __device__ __forceinline__ void exchange(float (&theirs)[4], const float (&ours)[4]) const {
    put(partner + kGroups * 512, ours);
    ptx::barrier_sync<64>(barrier);
    take(theirs, own + kGroups * 512);
  }

  // The partner's weights of group n.
  __device__ __forceinline__ void take_weights(float (&x)[4], int n) const {
    take(x, own + n * 512);
  }

  // Four numbers of the lane, for itself.
  __device__ __forceinline__ void keep(const float (&x)[4]) const {
    put(own + (kGroups + 1) * 512, x);
  }
  __device__ __forceinline__ void take_kept(float (&x)[4]) const {
    take(x, own + (kGroups + 1) * 512);
  }

 private:
  static __device__ __forceinline__ void put(uint32_t to, const float (&x)[4]) {
    ptx::store_shared(to, x[0], x[1], x[2], x[3]);
  }
  static __device__ __forceinline__ void take(float (&x)[4], uint32_t from) {
    const int4 words = ptx::load_shared_16(from);
    x[0] = __uint_as_float(static_cast<uint32_t>(words.x));
    x[1] = __uint_as_float(static_cast<uint32_t>(words.y));
    x[2] = __uint_as_float(static_cast<uint32_t>(words.z));
    x[3] = __uint_as_float(static_cast<uint32_t>(words.w));
  }
};

}  // namespace flashattn::cuda::sm80
