// The backward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024).
//
// One block a multiprocessor, which stays for many tiles of 128 keys. Of the first warpgroup one
// thread plans the tiles, two start the loads, one adds dQ to fp32 sums in global memory. Each
// consumer warpgroup holds dK and dV of 64 keys and sees all queries of the group pass by: S^T = K
// Q^T, dP^T = V dO^T, so that P^T and dS^T are register operands of dV += P^T dO and dK += dS^T Q.
// Only dS goes through shared memory, for dQ = dS K, which needs all keys of the tile.
//
// Shared memory: K | V | stages of Q | dO | dS | dQ | stages of lse | D | BackwardControl.
// Budget of a step at D = 128, 64 queries, in clocks: the products 2,560; shared memory 2,944 (368
// KB at 128 a clock); 2^x 512.
#pragma once

#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/backward_wide.cuh"

namespace flashattn::cuda::sm90 {

template <class Config, int kGroup>
__device__ __forceinline__ void consume(const BackwardParams& params, uint32_t shared,
                                        BackwardControl<Config>& control) {
  if constexpr (Config::kWide) {
    WideConsumer<Config, kGroup == 1>(params, shared, control).run();
  } else {
    BackwardConsumer<Config, kGroup>(params, shared, control).run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  static_assert(kBackwardSharedBytes<Config> <= kMostSharedBytes, "one block a multiprocessor");
  char* const shared = ptx::dynamic_shared();
  BackwardControl<Config>& control =
      *reinterpret_cast<BackwardControl<Config>*>(shared + Config::kMainBytes);
  // Uniform, so that descriptors live in uniform registers.
  const int32_t warpgroup = (__any_sync(~0u, threadIdx.x & 128) ? 1 : 0) +
                            (__any_sync(~0u, threadIdx.x & 256) ? 2 : 0);
  if (threadIdx.x == 0) {
    init_barriers<Config>(control);
    for (const CUtensorMap* map : {&params.q, &params.dout, &params.k, &params.v}) {
      ptx::tma_prefetch(map);
    }
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_release<Config::kProducerRegisters>();
    if (threadIdx.x % 32 != 0) return;
    const int32_t warp = threadIdx.x / 32;
    const uint32_t start = ptx::shared_address(shared);
    if (warp == 0) BackwardLoader<Config, false>(params, start, control).run();
    if (warp == 1) BackwardLoader<Config, true>(params, start, control).run();
    if (warp == 2) plan_items<Config>(params, control);
    if (warp == 3) add_dq<Config>(params, start, control);
  } else if (Config::kDqGroup && warpgroup == 1 + Config::kConsumers) {
    ptx::registers_release<Config::kDqRegisters>();
    DqGroup<Config>(params, ptx::shared_address(shared), control).run();
  } else {
    ptx::registers_claim<Config::kConsumerRegisters>();
    // Code of its own for each: the compiler then knows descriptors to be uniform.
    if (warpgroup == 1) {
      consume<Config, 0>(params, ptx::shared_address(shared), control);
    } else {
      consume<Config, 1>(params, ptx::shared_address(shared), control);
    }
  }
}

}  // namespace flashattn::cuda::sm90
