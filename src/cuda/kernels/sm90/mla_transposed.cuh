// Latent attention on Hopper for few rows (query, head) and a quantised cache, LATENT_KV: V in E4M3
// with a descale for every 128 columns, the rotary columns of K in 16 bits. WGMMA, bulk copies,
// warp specialisation.
//
// Products are transposed: S^T = K Q^T has 64 keys and O^T = V^T P^T 64 columns of V along M, the
// CTA's 16 or 32 rows along N. So few rows need no padding to 64, and the cache is the A operand,
// which WGMMA takes from registers: warps convert E4M3 to fp16 there, exactly, by one instruction
// for two elements, and no 16-bit tile is written to shared memory and read again. The bytes that
// ldmatrix gives a lane are its fragment of K, if the columns of Q are permuted; transposed, they
// are pairs of columns of V for two keys each, which __byte_perm() sorts.
//
// The producer copies records as they are to four stages of 64 keys. Two consumer warpgroups take
// pairs of tiles: each computes S and P of one, stores P for both, and computes half of the columns
// of P V of both tiles. The first one's tile comes first in sequence, its own first in each
// warpgroup. Keys are visited in ascending order.
//
// Numbers. Q is scaled by a power of two to fp16. Each group of 128 columns of S has sums of its
// own, so that descales multiply fp32: scores are as exact as fp32 products. V is multiplied by
// its descale relative to a power of two of the key's largest one, in fp16; P by that power
// relative to a unit of O, which follows the descales (change_unit()), and by 2^lift, so that what
// fp16 loses below is small in sum (lift_of_p()). O is redone as below if P overflows.
//
// Fixed-base softmax as in mla.cuh: the base of a row is its maximum over the pairs of tiles until
// every row has seen a key. Rows are columns here, and maxima and sums cross all warps: they go
// through shared memory, where a thread finishes each row. A sum or O out of range: the CTA
// computes its tile again, with online softmax in every step.
//
// Shared memory: Q 18 or 36 KB | P 2 x 2 or 4 KB | records 4 x 41 KB | SharedStorage.
// Registers: producer 40, consumers 232.
//
// Budget of a pair of tiles on an H200, in clocks at 1.98 GHz: 82 KB from memory 5,000; conversions
// and their shifts 1,800 of each scheduler's half-rate pipe; WGMMAs of 16 rows 1,800 (13 each, two
// warpgroups), of 32 2,200. What remains is latency: a warpgroup waits for its own conversions,
// products, barriers. Stamps with 16 rows, an earlier state of 5,900 clocks: S 2,030, softmax and
// storing P 770, P V 990 and 1,150, waiting for the other one's P 400. With 64 rows the kernel
// would take as long as mla.cuh.
#pragma once

#include "cuda/kernels/sm90/mla_transposed_mainloop.cuh"
#include "cuda/kernels/sm90/mla_transposed_producer.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    mla_transposed_kernel(const __grid_constant__ MlaParams params) {
  char* const shared = ptx::dynamic_shared();
  auto& storage = *reinterpret_cast<typename Config::SharedStorage*>(shared + Config::kTensorBytes);
  // Warp-uniform, so that descriptors stay in uniform registers.
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    MlaWorkTile tile;
    storage.has_work = plan_mla_work_tile<Config::kTileQ>(params, tile);
    storage.work_tile = tile;
    storage.records = first_record(params, tile);
    storage.lift = lift_of_p((tile.tiles.end - tile.tiles.begin) * Config::kTileKv);
    storage.redo = 0;
    storage.k.init(MlaTransposedProducer<Config>::warps(params), 4 * Config::kConsumers);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // Plans read no memory but lengths. Where there are any, the kernel does not start early.
  ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (!storage.has_work) return;
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    MlaTransposedProducer<Config> producer(params, ptx::shared_address(shared), storage);
#pragma unroll 1
    for (;;) {
      producer.load_tiles();
      if (producer.is_redo()) break;
      __syncthreads();
      if (!storage.is_redo()) break;
      producer.begin_redo();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    MlaTransposedMainloop<Config>(params, ptx::shared_address(shared), storage, warpgroup - 1)
        .run();
  }
}

}  // namespace flashattn::cuda::sm90
