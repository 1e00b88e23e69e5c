// In place of src/cuda/ptx/cluster.cuh.
#pragma once

#include "emulator.h"

namespace flashattn::cuda {
constexpr bool kHasClusters = true;
}

namespace flashattn::cuda::ptx {

inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(false); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline uint32_t mapa(uint32_t address, uint32_t rank) { return emulator::mapa(address, rank); }
inline void mbarrier_arrive_remote(uint32_t barrier) { emulator::mbarrier_arrive_remote(barrier); }
inline void mbarrier_arrive_remote_if(uint32_t barrier) {
  if (barrier != 0) mbarrier_arrive_remote(barrier);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}
inline void st_async(uint32_t to, uint32_t x, uint32_t barrier) {
  emulator::st_async(to, x, barrier);
}
inline void st_async_8(uint32_t to, uint32_t x, uint32_t y, uint32_t barrier) {
  st_async(to, x, barrier);
  st_async(to + 4, y, barrier);
}
inline void st_async_16(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w,
                        uint32_t barrier) {
  st_async_8(to, x, y, barrier);
  st_async_8(to + 8, z, w, barrier);
}
inline void bulk_copy_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  emulator::engine_send(to, from, bytes, barrier);
}

}  // namespace flashattn::cuda::ptx
