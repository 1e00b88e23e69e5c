// The panels in which TMA loads a dense bias: boxes of its tensor map, which kernels read in shared
// memory.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn::cuda {

constexpr int kBiasPanelRows = 64;
constexpr int kBiasPanelBytes = kBiasPanelRows * 128;  // the most: 128 bytes a row

// The panels that hold the bias of 64 queries and kTileKv keys. element: bytes of an element of the
// bias: 1, 2 or 4. Without divisions by it, as kernels ask in each step.
template <int kTileKv>
struct BiasPanels {
  static_assert(kTileKv == 64 || kTileKv == 128, "TMA rows of 64 or 128 bytes if it is boolean");

  static FLASHATTN_HD constexpr int32_t row_bytes(int32_t element) {
    return element == 1 ? kTileKv : 128;
  }
  static FLASHATTN_HD constexpr int32_t columns(int32_t element) {
    return element == 1 ? kTileKv : 128 >> element / 2;
  }
  static FLASHATTN_HD constexpr int32_t count(int32_t element) {
    return element == 1 ? 1 : kTileKv * element / 128;
  }
};

}  // namespace flashattn::cuda
