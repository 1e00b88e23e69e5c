// Which CTA is the last of several to finish. The memory needs no initial value.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda {

// A word of global memory: the number of CTAs that have arrived, and above it a stamp that no other
// launch has. Every CTA of the launch sees to the stamp before it adds itself. The last one clears
// the word, because a graph replay launches with the same stamp. One thread of a CTA has it.
struct ArrivalCounter {
  uint64_t* word;
  uint64_t stamp;  // its lowest kArrivalBits are 0
  uint64_t found;  // in the word, before this CTA arrived

  // The load is on its way until arrive() needs it.
  static __device__ __forceinline__ ArrivalCounter open(uint64_t* word, uint64_t stamp) {
    return {word, stamp, ptx::load_relaxed(word)};
  }

  // Whether this CTA is the last of `count`. It releases what the CTA wrote before its last
  // barrier; the last CTA acquires what all have released.
  __device__ __forceinline__ bool arrive(int32_t count) const {
    ptx::fence_gpu();
    // Stores only if no other CTA has: the word then changes while `found` stays as it is.
    if ((found ^ stamp) >> kArrivalBits) ptx::compare_and_store_relaxed(word, found, stamp);
    const uint64_t before = ptx::fetch_add_relaxed(word, 1);
    if (static_cast<int32_t>(before & ((1 << kArrivalBits) - 1)) != count - 1) return false;
    ptx::store_relaxed(word, uint64_t{0});
    ptx::fence_gpu();
    return true;
  }
};

}  // namespace flashattn::cuda
