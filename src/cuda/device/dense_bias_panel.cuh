// Dense bias in shared memory: in panels that TMA has loaded.
#pragma once

#include "cuda/bias_panels.h"
#include "cuda/device/dense_bias.cuh"
#include "cuda/device/fragment.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/ptx/copy.cuh"

namespace flashattn::cuda {

// Base class of a kernel's shared storage: the pipeline of bias panels, if the kernel has a dense
// bias. Each consumer warpgroup has panels of its own. Empty otherwise, so that other kernels'
// addresses stay as they are.
template <bool kHasBias, int kStages, int kConsumers>
struct BiasPipeline {};
template <int kStages, int kConsumers>
struct BiasPipeline<true, kStages, kConsumers> {
  Pipeline<kStages, kConsumers> bias;
};

// Base class of a consumer: its position in that pipeline, if there is a dense bias.
template <bool kHasBias, int kStages>
struct BiasPosition {};
template <int kStages>
struct BiasPosition<true, kStages> {
  PipelineState<kStages> bias_state_;
};

// The address of a byte of a panel, with the swizzle of its rows. The panel begins at a multiple of
// 1024 bytes.
template <class Panels, int kElement>
__device__ __forceinline__ uint32_t bias_address(uint32_t panel, int32_t row, int32_t byte) {
  constexpr int32_t kRow = Panels::row_bytes(kElement);
  const uint32_t offset = row * kRow + byte;
  return panel + (offset ^ (offset >> 7 & (kRow / 16 - 1)) << 4);
}

// The dense bias of a fragment of S, read from panels in natural units: scores are those of the
// specification. Panels: the stages of a pipeline that the caller's warp waits for and releases.
template <int kTileKv, class T, class Panels>
struct DenseBiasPanels {
  using Geometry = BiasPanels<kTileKv>;
  Panels panels;
  int32_t dtype;
  int32_t row;  // the warp's first row in a panel
  int32_t lane;

  // factor: still to be applied to the scores.
  template <int kCount>
  __device__ __forceinline__ float forward(SLayout, float (&s)[kCount], float factor) const {
    static_assert(kCount == kTileKv / 2, "a whole tile");
    if (dtype == FLASHATTN_DTYPE_F32) {
      add_fp32(s, factor);
    } else if (dtype == FLASHATTN_DTYPE_U8) {
      hide(s, factor);
    } else {
      add_16_bit(s, factor);
    }
    return 1.0f;
  }

 private:
  // ldmatrix gives each lane the bias of its own accumulators.
  __device__ __forceinline__ void add_16_bit(float (&s)[kTileKv / 2], float factor) const {
#pragma unroll
    for (int p = 0; p < Geometry::count(2); ++p) {
      const uint32_t panel = panels.wait(p);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t words[4];
        ptx::ldmatrix_x4(words,
                         bias_address<Geometry, 2>(panel, row + lane % 16, (n + lane / 16) * 16));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 bias = ptx::unpack<T>(words[w]);
          float* const x = &s[p * 32 + 4 * n + 2 * w];
          x[0] = DenseBias::apply<T>(x[0], factor, bias.x, 1.0f);
          x[1] = DenseBias::apply<T>(x[1], factor, bias.y, 1.0f);
        }
      }
      panels.release(p);
    }
  }

  __device__ __forceinline__ void add_fp32(float (&s)[kTileKv / 2], float factor) const {
#pragma unroll
    for (int p = 0; p < Geometry::count(4); ++p) {
      const uint32_t panel = panels.wait(p);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 bias = ptx::load_shared_pair(
              bias_address<Geometry, 4>(panel, row + lane / 4 + half * 8, n * 32 + lane % 4 * 8));
          float* const x = &s[p * 16 + 4 * n + 2 * half];
          x[0] = DenseBias::apply<float>(x[0], factor, bias.x, 1.0f);
          x[1] = DenseBias::apply<float>(x[1], factor, bias.y, 1.0f);
        }
      }
      panels.release(p);
    }
  }

  // A boolean bias: two lanes read the same word, and each uses half of it.
  __device__ __forceinline__ void hide(float (&s)[kTileKv / 2], float factor) const {
    const uint32_t panel = panels.wait(0), first = 0xffu << lane % 2 * 16;
#pragma unroll
    for (int n = 0; n < kTileKv / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t word = ptx::load_shared(
            bias_address<Geometry, 1>(panel, row + lane / 4 + half * 8, n * 8 + lane % 4 / 2 * 4));
        float* const x = &s[4 * n + 2 * half];
        x[0] = word & first ? x[0] * factor : -INFINITY;
        x[1] = word & first << 8 ? x[1] * factor : -INFINITY;
      }
    }
    panels.release(0);
  }
};

// The dense bias of a fragment of S^T of 64 keys and 64 queries: a warp has 16 keys. Scores may
// have any unit.
template <class T, class Panels>
struct TransposedBiasPanels {
  using Geometry = BiasPanels<64>;
  static constexpr int kCount = 32;  // elements of a lane
  Panels panels;
  int32_t dtype, warp, lane;

  // log2e: in the units of the scores.
  __device__ __forceinline__ void add(StLayout<>, float (&s)[kCount], float log2e) const {
    if (dtype == FLASHATTN_DTYPE_F32) {
      add_fp32(s, log2e);
    } else if (dtype == FLASHATTN_DTYPE_U8) {
      hide(s);
    } else {
      add_16_bit(s, log2e);
    }
  }

  __device__ __forceinline__ void skip() const {
    for (int p = 0; p < Geometry::count(dtype_size(dtype)); ++p) {
      panels.wait(p);
      panels.release(p);
    }
  }

 private:
  // ldmatrix.trans gives each lane the bias of its own accumulators.
  __device__ __forceinline__ void add_16_bit(float (&s)[kCount], float log2e) const {
    const uint32_t panel = panels.wait(0);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, bias_address<Geometry, 2>(panel, (n + lane / 16) * 8 + lane % 8,
                                                              (warp * 2 + lane / 8 % 2) * 16));
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 bias = ptx::unpack<T>(words[w]);
        float* const x = &s[4 * n + 2 * w];
        x[0] = DenseBias::add<T>(x[0], bias.x, log2e);
        x[1] = DenseBias::add<T>(x[1], bias.y, log2e);
      }
    }
    panels.release(0);
  }

  // A warp's keys lie in one of two panels.
  __device__ __forceinline__ void add_fp32(float (&s)[kCount], float log2e) const {
    const uint32_t first = panels.wait(0), second = panels.wait(1);
    const uint32_t panel = warp / 2 == 0 ? first : second;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float bias = __uint_as_float(ptx::load_shared(
          bias_address<Geometry, 4>(panel, query(i), (warp % 2 * 16 + key(i)) * 4)));
      s[i] = DenseBias::add<float>(s[i], bias, log2e);
    }
    panels.release(0);
    panels.release(1);
  }

  // A boolean bias: a word holds four keys.
  __device__ __forceinline__ void hide(float (&s)[kCount]) const {
    const uint32_t panel = panels.wait(0), mask = 0xffu << lane / 4 % 4 * 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t word = ptx::load_shared(
          bias_address<Geometry, 1>(panel, query(i), (warp * 16 + key(i)) / 4 * 4));
      s[i] = word & mask ? s[i] : -INFINITY;
    }
    panels.release(0);
  }

  __device__ __forceinline__ int32_t query(int i) const {
    return lane % 4 * 2 + StLayout<>().query(i);
  }
  __device__ __forceinline__ int32_t key(int i) const { return lane / 4 + StLayout<>::key(i); }
};

}  // namespace flashattn::cuda
