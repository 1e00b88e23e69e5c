// Latent attention on Hopper (DeepSeek's MLA, absorbed): V is the first columns of K, one KV head
// has many query heads. TMA, WGMMA, warp specialisation.
//
// A CTA has 64 rows, (query, head) with the head fastest, so that a KV head's queries share tiles,
// and one split of the keys. The producer warpgroup has two warps for each of two stages of K, of
// 64 keys. V is read from the stages of K. Two consumer warpgroups take pairs of tiles: warpgroup w
// computes S and P of the tile in stage w, and columns [256 w, 256 w + 256) of P V of both tiles
// ("seesaw", as FlashMLA describes it). It keeps its own P in registers and stores it for the other
// one in the stage's panel behind V, whose scores are done by then. Warpgroup 1 issues P V of the
// other one's tile right behind its own Q K^T, warpgroup 0 behind its own P V: so they stay half a
// step apart, and one's WGMMAs run during the other one's softmax and loads.
//
// Up to 64 rows, and where threads copy rows, a KV tile takes longer to arrive than its products
// take. That order then starves the loads: stage 0 is released only after stage 1 has arrived. Each
// warpgroup therefore waits for its products of one tile before it turns to the other one
// (own_tile(), other_tile()), and O sums in the same order.
//
// CTAs of row tiles 2n and 2n + 1 are a cluster if both have rows: each loads every second panel of
// a KV tile for both, by multicast, which halves what L2 sends. A stage is free once both CTAs have
// released it. A CTA that redoes its tile does so alone, with loads of its own.
//
// Fixed-base softmax. The two agree on the base of each row by the first pairs of tiles, until
// every row has seen a key, and then need no exchange but that of P. Keys are visited in ascending
// order: a first token that all queries look at sets the base. If a later score exceeds the base by
// too much, the CTA computes its tile again, with online softmax in every step.
//
// A stage is loaded and released in two substages, the halves of V, so that the next tile's first
// half is under way while P V of the second half still runs. Pages of fewer than 8 keys are copied
// by threads of the producer warpgroup instead of TMA.
//
// LATENT_KV: two producer warpgroups load E4M3 to registers, and store it times its descale as a
// tile of 16 bits (mla_latent_producer.cuh). The consumers do not know. There are no clusters, and
// stages are released early.
//
// Shared memory: Q 72 KB | K 2 x 72 KB | SharedStorage 1.7 KB; 222,912 bytes.
// Registers of a consumer: 216, of which O 128, S 32, P 16; with LATENT_KV 192, of a producer 64.
// Releases have no branch and whole tiles no mask: with them all took 4 to 8 % longer.
//
// Budget of a pair of tiles, in clocks of the tensor cores: Q K^T 2 x 36 x 32 = 2,304; P V
// 2 x 8 x 128 = 2,048; together 4,352. Shared memory takes 4,600 for it: Q K^T of 64 columns reads
// 288 KB, P V 144 KB, TMA and P write 160 KB, at 128 bytes a clock. One warpgroup alone, in turn:
// Q K^T 1,152; 2^x 256 and some 300 instructions; P V 1,024. Bytes of a pair from memory: 144 KB,
// some 11,000 clocks at an H100's 3.35 TB/s over 132 SMs. Up to 64 rows a sequence wait for memory,
// 256 and more for the tensor cores; 128 rows are near both limits on an H100, and wait for the
// tensor cores on an H200 (4.2 TB/s). Measured there, 32k keys: 656 and 691 TFLOP/s with 128 and
// 256 rows; without clusters 4 % less.
//
// With LATENT_KV a pair has 82 KB in memory, some 4,500 clocks on an H200, and takes 4,900 in
// shared memory: TMA's 144 KB are the producers', and the other warpgroup's P is read twice. It
// takes some 9,300 (352 us for 32 x 32k keys, 64 heads). The producers never wait for a stage. By
// clock registers they store a substage in 1,200 to 1,600 clocks, of which a warp issues 400: few
// registers are free, so that each of its 8 stores waits until the one before has been read from
// them.
#pragma once

#include "cuda/kernels/sm90/mla_latent_producer.cuh"
#include "cuda/kernels/sm90/mla_mainloop.cuh"
#include "cuda/kernels/sm90/mla_producer.cuh"

namespace flashattn::cuda::sm90 {

// Synchronises all threads of the CTA or of the cluster.
__device__ __forceinline__ void sync_mla_ctas(const MlaParams& params) {
  if (params.cluster_size > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class Config>
using MlaProducerOf =
    std::conditional_t<Config::kIsLatent, MlaLatentProducer<Config>, MlaProducer<Config>>;

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    mla_kernel(const __grid_constant__ MlaParams params) {
  char* const shared = ptx::dynamic_shared();
  auto& storage = *reinterpret_cast<typename Config::SharedStorage*>(shared + Config::kTensorBytes);
  // Warp-uniform, so that descriptors stay in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    if (params.kv_box_rows > 0) ptx::tma_prefetch(&params.k);  // otherwise the host leaves it unset
    MlaWorkTile tile;
    storage.has_work = plan_mla_work_tile<Config::kTileQ>(params, tile);
    storage.work_tile = tile;
    if constexpr (Config::kIsLatent) storage.records = first_record(params, tile);
    storage.redo = 0;
    storage.k.init(MlaProducerOf<Config>::arrivals(params), params.cluster_size);
    ptx::fence_mbarrier_init();
  }
  // From here on barriers are initialised, in both CTAs of a cluster. Both have work, or neither.
  sync_mla_ctas(params);
  // Plans read no memory but lengths. Where there are any, the kernel does not start early.
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (!storage.has_work) return;
  if (warpgroup < Config::kProducers) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    MlaProducerOf<Config> producer(params, ptx::shared_address(shared), storage);
#pragma unroll 1
    for (;;) {
      producer.load_tiles();
      if (producer.is_redo()) break;
      end_first_pass(params);
      if (!storage.is_redo()) break;
      producer.begin_redo();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    MlaMainloop<Config>(params, ptx::shared_address(shared), storage,
                        warpgroup - Config::kProducers)
        .run();
  }
  if (params.cluster_size > 1) ptx::cluster_wait();
}

}  // namespace flashattn::cuda::sm90
