// The emulator's tensor map, in place of the 128 bytes that cuTensorMapEncodeTiled writes: boxes
// with rows of 128 or 64 bytes in shared memory, their chunks exchanged.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "emulator.h"

namespace emulator {

inline uint32_t exchanged(uint32_t address, uint32_t row_bytes = 128) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

struct TensorMap {
  char* base;
  uint64_t size[4];
  uint64_t stride[4];  // bytes; the first: of an element
  uint32_t rows;       // of the box, of each of its heads; 0: nobody has encoded the map
  uint32_t heads;      // of the box
  uint32_t row_bytes;

  static TensorMap of(const CUtensorMap* map) {
    TensorMap box;
    std::memcpy(&box, map, sizeof box);
    if (box.rows == 0) fail("the copy engine is given a tensor map that nobody has encoded");
    return box;
  }

  uint32_t bytes() const { return rows * heads * row_bytes; }

  // visit(chunk, its place in the array, how many of its bytes lie in the array)
  template <class Visit>
  void each_chunk(int64_t column, int64_t row, int64_t head, int64_t batch, Visit visit) const {
    const auto inside = [this](int64_t n, int d) {
      return n >= 0 && static_cast<uint64_t>(n) < size[d];
    };
    for (uint32_t r = 0; r < rows * heads; ++r) {
      const int64_t its_row = row + r % rows, its_head = head + r / rows;
      const bool some = inside(its_row, 1) && inside(its_head, 2) && inside(batch, 3);
      for (uint32_t c = 0; c < row_bytes / 16; ++c) {
        const int64_t element = static_cast<int64_t>(stride[0]), in_chunk = 16 / element;
        const int64_t first = column + c * in_chunk, left = static_cast<int64_t>(size[0]) - first;
        const int64_t valid = some && left > 0 ? std::min(left, in_chunk) * element : 0;
        char* at = valid == 0 ? nullptr
                              : base + batch * static_cast<int64_t>(stride[3]) +
                                    its_head * static_cast<int64_t>(stride[2]) +
                                    its_row * static_cast<int64_t>(stride[1]) + first * element;
        visit(r * (row_bytes / 16) + c, at, static_cast<int>(valid));
      }
    }
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "room");

}  // namespace emulator
