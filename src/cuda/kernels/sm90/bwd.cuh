// The backward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024).
//
// One block a multiprocessor, which stays for many tiles of keys. Of the first warpgroup one thread
// plans the tiles and looks for dQ to convert, one starts the loads, two add dQ to fp32 sums in
// global memory. All that comes after bwd_preprocess.cu or, where many heads are short, follows it
// head by head. The consumers hold dK and dV and see all queries of the group pass by, in tiles:
// S^T = K Q^T, dP^T = V dO^T, so that P^T and dS^T are register operands of dV += P^T dO and dK +=
// dS^T Q; at D = 128 they pass over tiles that see none of their keys. Only dS goes through shared
// memory, for dQ = dS K, which needs all keys of the tile; it is stored with the keys along its
// rows, as the tensor cores like to read a left operand.
//
// A third warpgroup computes dQ, so that the consumers never meet, and one's exponentials run under
// the other's products. Small heads, bwd_mainloop.cuh: 128 keys, 64 a consumer; while the
// third warpgroup waits for dS, it converts tiles of dQ that are complete. A kernel after this one
// converts all others. Large heads, bwd_large_head.cuh: 64 keys; one consumer has P and dV, the
// other dS and dK. The largest: clusters of two blocks, which share what adding dQ to global memory
// costs, see BwdLargeHeadConfig. Many queries, bwd_two_warpgroup.cuh: larger tiles of them, and no
// warpgroup for dQ.
//
// Budget of a tile in clocks; shared memory moves 128 bytes a clock; no tile fills both alone.
//   D, queries x keys      products   2^x   shared memory          of it dQ to memory
//   64, 128 x 128          2,560    1,024   384 KB = 3,072                      32 KB
//   128, 64 x 128          2,560      512   368 KB = 2,944                      32 KB
//   128, 80 x 128          3,200      640   436 KB = 3,488                      40 KB
//   192, 64 x 64           1,920      256   360 KB = 2,880                      48 KB
//   256, 64 x 64 of two    2,560      256   408 KB = 3,264                      32 KB
// Beyond those, the L2 cache adds some 3 TB/s (derived from peers' kernels), next to what it is
// read for. At D = 256 a block by itself adds 64 KB a tile and moves 472 KB: 530 TFLOP/s were
// measured.
#pragma once

#include "cuda/kernels/sm90/dq_reduce.cuh"
#include "cuda/kernels/sm90/bwd_mainloop.cuh"
#include "cuda/kernels/sm90/bwd_two_warpgroup.cuh"
#include "cuda/kernels/sm90/bwd_producer.cuh"
#include "cuda/kernels/sm90/bwd_large_head.cuh"

namespace flashattn::cuda::sm90 {

// Of the block, or of both that share items.
template <class Config>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (Config::kTwoCta) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bwd_kernel(const __grid_constant__ BackwardParams params) {
  static_assert(kBwdSharedBytes<Config> <= kMaxSharedBytes, "one block a multiprocessor");
  char* const shared = ptx::dynamic_shared();
  BwdSharedStorage<Config>& storage =
      *reinterpret_cast<BwdSharedStorage<Config>*>(shared + Config::kMainBytes);
  // Uniform, so that descriptors live in uniform registers.
  const int32_t warpgroup =
      (__any_sync(~0u, threadIdx.x & 128) ? 1 : 0) + (__any_sync(~0u, threadIdx.x & 256) ? 2 : 0);
  if (threadIdx.x == 0) {
    init_barriers<Config>(storage);
    for (const CUtensorMap* map : {&params.q, &params.dout, &params.k, &params.v}) {
      ptx::tma_prefetch(map);
    }
  }
  sync_cluster<Config>();
  ptx::griddep_launch_dependents();
  if (!Config::kOverlapPreprocess || !params.preprocess) ptx::griddep_wait();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int32_t warp = threadIdx.x / 32;
    if (!(Config::kIsRuntime && warp == 1) && !ptx::elect()) return;
    const uint32_t start = ptx::shared_address(shared);
    if (warp == 0) BwdProducer<Config>(params, start, storage).run();
    if (warp == 1) {
      scheduler_warp(params, storage);
      ptx::griddep_wait();  // who waits for this kernel waits for that one, too
    }
    if (warp >= 2) DqReducer<Config>(params, start, storage).run();
  } else if constexpr (Config::kConsumersComputeDq) {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    BwdTwoWarpgroupMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1)
        .run();
  } else if (warpgroup == 1 + Config::kConsumers) {
    ptx::setmaxnreg_dec<Config::kDqRegisters>();
    DqMmaWarpgroup<Config>(params, ptx::shared_address(shared), storage).run();
  } else if constexpr (Config::kSplitRoles) {
    if (warpgroup == 1) {
      ptx::setmaxnreg_inc<Config::kSoftmaxRegisters>();
      BwdLargeHeadMainloop<Config, false>(params, ptx::shared_address(shared), storage).run();
    } else {
      ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
      BwdLargeHeadMainloop<Config, true>(params, ptx::shared_address(shared), storage).run();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    // The same code for both: caches of instructions are small.
    BwdMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1).run();
  }
  // Nobody arrives at a block that has ended.
  if constexpr (Config::kTwoCta) sync_cluster<Config>();
}

}  // namespace flashattn::cuda::sm90
