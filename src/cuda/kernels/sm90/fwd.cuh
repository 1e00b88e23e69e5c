// The forward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024), with a fixed
// softmax base instead of a running maximum.
//
// CTAs are persistent: one per multiprocessor with two or three consumer warpgroups, or, for short
// sequences, two or three with one consumer each, where the prologue and epilogue of one overlap
// the WGMMAs of the others. One warp schedules tiles, one to three issue all loads, and each
// consumer warpgroup computes 64 rows. A step issues Q K^T of a KV tile together with P V of the
// tile before it; its softmax overlaps the WGMMAs of the other warpgroups, which issue in a fixed
// order. If rows see only half of their first or last KV tile, only that half's scores are
// computed, where registers allow. A short last wave is split along its keys: fwd_stream_k.cuh.
//
// Fixed-base softmax. P = 2^(s - r) gives the same O for any base r. r is the row maximum of the
// first KV tiles visited and then stays, so that the mainloop needs no maxima, no shuffles and no
// rescaling of O. In fp16 the first 8 keys of a sequence may raise r once more: they are in the
// tile that is visited last. If another later score exceeds r by too much, the row sum passes 2^120
// or O is not finite: the CTA then recomputes the Q tile with online softmax, once its other tiles
// are done.
// With ALiBi, r may also be predicted, or follow from the paired row, and be too high: then the row
// sum is too small, and the tile is recomputed, too.
//
// Shared memory: Q | K stages | V stages | O | bias stages | SharedStorage.
// Budget of a step at D = 128, 64 keys, three warpgroups, in clocks: WGMMA 3 x 512; 2^x 3 x 256;
// instructions 3 x 212 on each of the four schedulers. At D = 64, 128 keys: 3 x 512, 3 x 512,
// 3 x 319. Measured at D = 128: 1,533 per step; 5,300 from the last P of a Q tile to the first
// WGMMA of the next: P V 500, LSE and O 1,600, Q K^T 650, the first softmax 1,200.
// Between Q tiles, code is executed once and must be fetched: ncu counts some 40 clocks after each
// jump and up to 1.5 an instruction, which was a fifth of that time at D = 64. Hence what usual
// tiles execute is contiguous: unusual tiles stand behind it, rare loops are not unrolled, and the
// usual epilogue has no options. (Issuing the next tile's Q K^T before the epilogue was 3 % slower:
// the wait for its plan, K and Q then delays O.)
#pragma once

#include "cuda/kernels/sm90/fwd_fp8_transposer.cuh"
#include "cuda/kernels/sm90/fwd_mainloop.cuh"
#include "cuda/kernels/sm90/fwd_producer.cuh"
#include "cuda/kernels/sm90/fwd_scheduler.cuh"

namespace flashattn::cuda::sm90 {

constexpr int32_t kSchedulerWarp = 1;

template <class Config, class Mainloop>
__device__ __forceinline__ void run_forward(const ForwardParams& params) {
  char* const shared = ptx::dynamic_shared();
  SharedStorage<Config>& storage =
      *reinterpret_cast<SharedStorage<Config>*>(shared + Config::kTensorBytes);
  // Warp-uniform, so that descriptors stay in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  // Small pages need many TMA copies, and with a block mask producers wait for windows: K and V
  // then have a producer warp each.
  const bool split_kv_producers =
      !Config::kTransposesV &&
      (params.problem.layout & FLASHATTN_LAYOUT_PAGED_KV ||
       (kMayHideTiles<Config> && params.problem.mask & FLASHATTN_MASK_BLOCKS));
  if (threadIdx.x == 0) {
    init_barriers<Config>(storage, split_kv_producers ? 2 : 1);
    for (const CUtensorMap* map : {&params.q, &params.k}) ptx::tma_prefetch(map);
    if (!Config::kIsFp8 || Config::kTransposesV) ptx::tma_prefetch(&params.v);
    if (Config::kHasDenseBias) ptx::tma_prefetch(&params.bias);
    if (params.o_by_tma) ptx::tma_prefetch(&params.o);  // otherwise the host leaves the map unset
  }
  for (int32_t n = threadIdx.x; n < kRedoCapacity; n += Config::kThreads) storage.redo_queue[n] = 0;
  if (threadIdx.x == 0) storage.base_overflowed = 0;
  __syncthreads();
  // Packed heads: to plan its only work tile, the scheduler warp reads no memory but lengths.
  const bool plans_early =
      Config::kPacksHeads && threadIdx.x / 32 == kSchedulerWarp && params.tile_counter == nullptr;
  if (!plans_early) ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // With separate conditions instead of if and else, registers spill.
    if (warp == 0 || (warp == 3 && split_kv_producers)) {
      KvProducer<Config>(params, ptx::shared_address(shared), storage, warp == 0,
                         warp == 3 || !split_kv_producers)
          .run();
    } else if (warp == kSchedulerWarp) {
      SchedulerWarp<Config>(params, storage).run();
    } else if constexpr (Config::kTransposesV) {
      VTransposer<Config>(ptx::shared_address(shared), storage).run();
    } else if (Config::kQProducerWarp && warp == 2) {
      QProducer<Config> producer(params, ptx::shared_address(shared), storage);
      if constexpr (Config::kHasDenseBias) {
        BiasProducer<Config> bias(params, ptx::shared_address(shared), storage);
        for_each_work_tile(storage, [&producer, &bias](const auto& work_tile) {
          producer.load(work_tile);
          bias.load(work_tile);
        });
      } else {
        for_each_work_tile(storage,
                           [&producer](const auto& work_tile) { producer.load(work_tile); });
      }
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Mainloop(params, ptx::shared_address(shared), storage, warpgroup - 1).run();
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    fwd_kernel(const __grid_constant__ ForwardParams params) {
  run_forward<Config, FwdMainloop<Config>>(params);
}

}  // namespace flashattn::cuda::sm90
