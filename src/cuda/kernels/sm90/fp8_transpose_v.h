// Transposes V of E4M3 for the Hopper forward kernel, which reads tiles of V^T.
#pragma once

#include <cuda_runtime_api.h>

#include "core/call.h"
#include "core/problem.h"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

constexpr int32_t kTransposeVColumns = 64;  // columns of V that a CTA transposes

struct TransposeVParams {
  Problem problem;
  ForwardArrays args;
  int32_t tiles;  // KV tiles of the longest sequence
  uint8_t* to;    // tiles of HeadTiles::of_keys: (tile, KV head, column, key)
  // With block_descales: (KV head, tile, half); (batch, KV head). See ForwardParams.
  HalfDescales* half_descales;
  float* largest_descale_v;
};

// dim: columns of V in a tile: 64, 128 or 256. Its grid has dim / kTransposeVColumns CTAs per tile,
// KV head and sequence. block_descales: it also prepares descales for kernels of kBlockDescales.
struct TransposeVKernel {
  int32_t threads;
  void (*kernel)(TransposeVParams);
};

TransposeVKernel transpose_v_kernel(int32_t dim, bool block_descales);

}  // namespace flashattn::cuda::sm90
