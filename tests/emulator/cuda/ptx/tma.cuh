// In place of src/cuda/ptx/tma.cuh.
#pragma once

#include <cuda.h>

#include "cuda/ptx/operands.cuh"
#include "tensor_map.h"

namespace flashattn::cuda::ptx {

// A load to address `to` of the CTA for which the engine runs it.
inline std::function<void()> load_of(uint32_t to, const emulator::TensorMap& box, TmaCoord at) {
  emulator::check_shared(to, 16);
  return [=] {
    box.each_chunk(
        at.column, at.row, at.head, at.batch, [&](uint32_t chunk, char* from, int valid) {
          const uint32_t own = emulator::own_address(to + chunk * 16);
          char* place = emulator::engine_place(emulator::exchanged(own, box.row_bytes), 16);
          std::memset(place, 0, 16);
          if (valid <= 0) return;
          emulator::engine_reads(from, static_cast<size_t>(valid));
          std::memcpy(place, from, static_cast<size_t>(valid));
        });
  };
}

// Every lane waits for the others, as elect.sync does: a lane that went on alone could use a buffer
// before the others have seen it empty.
inline bool elect() {
  emulator::warp_sync();
  return emulator::lane() == 0;
}

inline void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, TmaCoord at, uint64_t) {
  const emulator::TensorMap box = emulator::TensorMap::of(map);
  emulator::engine_load(barrier, box.bytes(), load_of(to, box, at));
}

inline void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, TmaCoord at,
                               uint64_t, uint32_t ranks) {
  const emulator::TensorMap box = emulator::TensorMap::of(map);
  emulator::engine_multicast(ranks, barrier, box.bytes(), load_of(to, box, at));
}

inline void tma_store(const CUtensorMap* map, uint32_t from, TmaCoord at) {
  const emulator::TensorMap box = emulator::TensorMap::of(map);
  emulator::engine_store(from, box.bytes(), [=](const char* data) {
    box.each_chunk(at.column, at.row, at.head, at.batch, [&](uint32_t chunk, char* to, int valid) {
      const char* place = data + (emulator::exchanged(from + chunk * 16, box.row_bytes) - from);
      if (valid > 0) emulator::engine_writes(to, place, static_cast<size_t>(valid));
    });
  });
}

inline void prefetch_l2(const void* from, uint32_t bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    emulator::fail("prefetch_l2 of %u bytes from %p", bytes, from);
  }
}

inline void prefetch_l2_line(const void*) {}
inline void tma_prefetch_l2(const CUtensorMap* map, TmaCoord) { emulator::TensorMap::of(map); }

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    emulator::fail("bulk_load of %u bytes from %p", bytes, from);
  }
  emulator::engine_load(barrier, bytes, [=] {
    emulator::engine_reads(from, bytes);
    std::memcpy(emulator::engine_place(to, bytes), from, bytes);
  });
}

inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  emulator::engine_store(from, bytes,
                         [=](const char* data) { emulator::engine_writes(to, data, bytes); });
}

inline void bulk_reduce_add(float* to, uint32_t from, uint32_t bytes, uint64_t) {
  emulator::engine_store(from, bytes,
                         [=](const char* data) { emulator::engine_adds(to, data, bytes / 4); });
}

inline void tma_prefetch(const CUtensorMap* map) { emulator::TensorMap::of(map); }
inline void bulk_commit() { emulator::engine_commit(); }
template <int kPending = 0>
void bulk_wait_read() {
  emulator::engine_wait(kPending, false);
}
template <int kPending = 0>
void bulk_wait() {
  emulator::engine_wait(kPending, true);
}

}  // namespace flashattn::cuda::ptx
