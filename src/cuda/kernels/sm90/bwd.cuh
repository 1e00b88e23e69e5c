// The backward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024).
//
// CTAs are persistent, one per multiprocessor; a work tile is a KV tile. In the first warpgroup one
// thread schedules work tiles and looks for dQ tiles to convert, one is the producer of all loads,
// and two reduce-add dQ to an fp32 accumulator in global memory. The kernel runs after
// bwd_preprocess.cu or, where many heads are short, follows it head by head. The consumers hold dK
// and dV and loop over the Q tiles of all heads of the GQA group: S^T = K Q^T and dP^T = V dO^T, so
// that P^T and dS^T are register operands of dV += P^T dO and dK += dS^T Q; at D = 128 they skip Q
// tiles that see none of their keys. Only dS goes through shared memory, for dQ = dS K, which needs
// all keys of the tile; it is stored K-major, a query's keys side by side, as WGMMA reads A
// from shared memory.
//
// A third warpgroup computes dQ, so that the consumers never synchronise with each other, and the
// exponentials of one overlap the WGMMAs of the other. Small heads, bwd_mainloop.cuh: 128 keys, 64
// per consumer; while the dQ warpgroup waits for dS, it converts complete dQ tiles to the output
// type. A postprocess kernel converts all others. Large heads, bwd_large_head.cuh: 64 keys; one
// consumer computes P and dV, the other dS and dK. The largest: clusters of two CTAs, which share
// the cost of adding dQ to global memory, see BwdLargeHeadConfig. Long Q, and heads of 192 and 128,
// bwd_two_warpgroup.cuh: no dQ warpgroup; larger Q tiles, or larger heads for the same 128 keys.
// For heads of 192 and 128, half of the scheduler's warp converts dQ.
//
// Kernels for block masks, and for any score modification, list the Q tiles that they visit, so
// that no role meets a hidden one. Before, bwd_block_mask.cu finds which tiles the mask shows, in
// bits, and for each Q tile the number of KV tiles that add to its dQ. The scheduler's warp makes a
// list for each work tile, bwd_q_tile_list.cuh; the producer and the reducers walk it, and the
// producer passes each entry to the consumers with its Q. With kSplitsDs the dQ warpgroup
// walks it, too: a consumer stores no dS of a Q tile that sees none of its keys.
//
// Budget of a Q tile in clocks; shared memory moves 128 bytes per clock. A tile alone does not keep
// both the tensor cores and shared memory busy.
//   D, queries x keys         WGMMA   2^x   shared memory      of which: dQ to memory
//   64, 128 x 128          2,560    1,024   384 KB = 3,072                      32 KB
//   128, 64 x 128          2,560      512   368 KB = 2,944                      32 KB
//   128, 80 x 128          3,200      640   436 KB = 3,488                      40 KB
//   192, 64 x 64           1,920      256   360 KB = 2,880                      48 KB
//   192 / 128, 64 x 128    3,328      512   472 KB = 3,776                      48 KB
//   256, 64 x 64, two CTAs 2,560      256   408 KB = 3,264                      32 KB
// Besides, L2 performs reduce-adds at some 3 TB/s (derived from other libraries' kernels), beside
// its reads. At D = 256 a single CTA adds 64 KB per Q tile and moves 472 KB: 530 TFLOP/s were
// measured.
#pragma once

#include "cuda/kernels/sm90/dq_reduce.cuh"
#include "cuda/kernels/sm90/bwd_mainloop.cuh"
#include "cuda/kernels/sm90/bwd_two_warpgroup.cuh"
#include "cuda/kernels/sm90/bwd_producer.cuh"
#include "cuda/kernels/sm90/bwd_scheduler.cuh"
#include "cuda/kernels/sm90/bwd_large_head.cuh"

namespace flashattn::cuda::sm90 {

// Synchronises all threads of the CTA or, with kTwoCta, of the cluster.
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
  static_assert(kBwdSharedBytes<Config> <= kMaxSharedBytes,
                "shared memory of a CTA is at most 227 KB");
  char* const shared = ptx::dynamic_shared();
  BwdSharedStorage<Config>& storage =
      *reinterpret_cast<BwdSharedStorage<Config>*>(shared + Config::kMainBytes);
  // Warp-uniform, so that descriptors stay in uniform registers.
  const int32_t warpgroup =
      (__any_sync(~0u, threadIdx.x & 128) ? 1 : 0) + (__any_sync(~0u, threadIdx.x & 256) ? 2 : 0);
  if (threadIdx.x == 0) {
    init_shared_storage<Config>(storage);
    for (const CUtensorMap* map : {&params.q, &params.dout, &params.k, &params.v}) {
      ptx::tma_prefetch(map);
    }
    if (Config::kHasDenseBias) ptx::tma_prefetch(&params.bias);
  }
  sync_cluster<Config>();
  ptx::griddep_launch_dependents();
  if (!Config::kOverlapPreprocess || !params.preprocess) ptx::griddep_wait();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int32_t warp = threadIdx.x / 32;
    const uint32_t start = ptx::shared_address(shared);
    // One thread per warp works; in a scheduler that lists Q tiles the whole warp does.
    const bool elected = (Config::kHasBlockMask && warp == 1) || ptx::elect();
    if constexpr (kHalfWarpPostprocess<Config>) {
      // These threads return here: they wait for the scheduler, which must not wait for them to
      // reconverge.
      if (warp == 1 && (threadIdx.x & 16))
        return DqHalfWarpPostprocess<Config>(params, start, storage).run();
    }
    if (!elected) return;
    if (warp == 0) BwdProducer<Config>(params, start, storage).run();
    if (warp == 1) {
      scheduler_warp(params, storage);
      ptx::griddep_wait();  // the end of this kernel implies the end of bwd_preprocess
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
    // Both consumers share one instance: instruction caches are small.
    BwdMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1).run();
  }
  // A CTA must not exit while its peer may still arrive at its barriers.
  if constexpr (Config::kTwoCta) sync_cluster<Config>();
}

}  // namespace flashattn::cuda::sm90
