// Hopper, gradient of a dense bias: from a row of table.txt to an instance of the kernel and its
// table entry.
#pragma once

#include "cuda/kernels/sm90/dbias.cuh"
#include "cuda/kernels/sm90/instance.cuh"

namespace flashattn::cuda::sm90 {

template <class T, int kDim, int kTileKv>
constexpr BackwardEntry dbias_instance() {
  using Config = DbiasConfig<T, kDim, kTileKv>;
  BackwardEntry entry{};
  entry.dtype = kDtype<T>;
  entry.dim_qk = entry.dim_v = kDim;
  entry.score_mod = ScoreModKind::kDenseBias;
  entry.tile_q = Config::kTileQ;
  entry.tile_kv = kTileKv;
  entry.cluster_size = 1;
  entry.consumers = Config::kConsumers;
  entry.stages = Config::kStages;
  entry.threads = Config::kThreads;
  entry.shared_bytes = kDbiasSharedBytes<Config>;
  entry.kernel = &dbias_kernel<Config>;
  return entry;
}

}  // namespace flashattn::cuda::sm90
