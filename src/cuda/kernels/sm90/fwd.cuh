// The forward pass on Hopper: TMA, WGMMA, warp specialisation (Shah et al. 2024), with a fixed
// reference in place of the running maximum.
//
// Blocks stay for many tiles of queries: one a multiprocessor, with two or three consumer
// warpgroups, or, for short sequences, two or three with one consumer, where one's start and end
// run under the others' products. One warp plans the tiles, one to three start all loads, and each
// consumer warpgroup works on 64 rows. Of a tile of keys, Q K^T is issued together with P V of the
// tile before, and the softmax runs under the products of the other warpgroups, which take turns.
// Of a first or last tile of which only a half is seen, only that half's scores are computed, where
// registers allow.
//
// The reference. Weights are 2^(s - r) for any r; the quotient is the same. r is the row's maximum
// over its first tiles and then stays, so that the main loop has no maxima, no shuffles and no
// rescaling of O. It errs only if a later score outgrows r by more than the numbers can hold: then
// the row's sum passes 2^100 or O is not finite, and the block does the tile over, with the running
// maximum in every step, when it has nothing else to do. With ALiBi r may also be foreseen, or
// follow another row's, and too high: then the sum is too small, and the tile is done over, too.
//
// Shared memory: Q | K stages | V stages | O | Control.
// Budget of a step at D = 128, 64 keys, three warpgroups, in clocks: the products 3 x 512; 2^x 3 x
// 256; instructions 3 x 212 on each of the four schedulers. At D = 64, 128 keys: 3 x 512, 3 x 512,
// 3 x 319. Measured at D = 128: 1,533 a step; from the last weights of a tile of queries to the
// first products of the next 5,300: P V 500, LSE and O 1,600, Q K^T 650, the first softmax 1,200.
#pragma once

#include "cuda/kernels/sm90/fwd_mainloop.cuh"
#include "cuda/kernels/sm90/fwd_producer.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  char* const shared = ptx::dynamic_shared();
  SharedStorage<Config>& storage =
      *reinterpret_cast<SharedStorage<Config>*>(shared + Config::kTensorBytes);
  // Uniform, so that descriptors live in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  // Small pages are many copies: keys and values are loaded by a warp each then.
  const bool split_kv_producers = params.problem.layout & FLASHATTN_LAYOUT_PAGED_KV;
  if (threadIdx.x == 0) {
    init_barriers<Config>(storage, split_kv_producers ? 2 : 1);
    for (const CUtensorMap* map : {&params.q, &params.k, &params.v}) ptx::tma_prefetch(map);
    if (params.o_by_tma) ptx::tma_prefetch(&params.o);  // else nobody has encoded it
  }
  for (int32_t n = threadIdx.x; n < kRedoCapacity; n += Config::kThreads) storage.redo_queue[n] = 0;
  if (threadIdx.x == 0) storage.base_overflowed = 0;
  __syncthreads();
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // Else: without it registers spill.
    if (warp == 0 || (warp == 3 && split_kv_producers)) {
      KvProducer<Config>(params, ptx::shared_address(shared), storage, warp == 0,
                         warp == 3 || !split_kv_producers)
          .run();
    } else if (warp == 1) {
      SchedulerWarp<Config>(params, storage).run();
    } else if (Config::kQProducerWarp && warp == 2) {
      QProducer<Config> producer(params, ptx::shared_address(shared), storage);
      for_each_work_tile(storage, [&producer](const auto& work_tile) { producer.load(work_tile); });
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    FwdMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1).run();
  }
}

}  // namespace flashattn::cuda::sm90
