// The backward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024).
//
// One block a multiprocessor, which stays for many tiles of 128 keys. Of the first warpgroup one
// thread plans the tiles, one starts all loads, one adds dQ to fp32 sums in global memory. Each
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

namespace flashattn::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  char* const shared = ptx::dynamic_shared();
  BackwardControl<Config>& control =
      *reinterpret_cast<BackwardControl<Config>*>(shared + Config::kMainBytes);
  // Uniform, so that descriptors live in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
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
    if (warp == 0) BackwardLoader<Config>(params, ptx::shared_address(shared), control).run();
    if (warp == 1) plan_items<Config>(params, control);
    if (warp == 2) add_dq<Config>(params, ptx::shared_address(shared), control);
  } else {
    ptx::registers_claim<Config::kConsumerRegisters>();
    BackwardConsumer<Config>(params, ptx::shared_address(shared), control, warpgroup - 1).run();
  }
}

}  // namespace flashattn::cuda::sm90
