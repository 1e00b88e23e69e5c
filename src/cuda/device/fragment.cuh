// Layouts of accumulator fragments: of which query and which key a lane's elements are.
//
// mma.sync and WGMMA lay out their results alike. Of 16 rows a lane has two: element 4 n + 2 h + e
// is of row lane / 4 + 8 h and column 8 n + 2 (lane % 4) + e. A strip [n][4] of the portable
// kernels has the same elements in the same order.
//
// A layout names the elements that a function works on, count(n) of the n of a fragment:
// element(x) is the place of the x-th in the fragment, query(x) and key(x) are the offsets of its
// query and key from those of the lane's first.
#pragma once

#include "core/mask_geometry.h"

namespace flashattn::cuda {

// S = Q K^T: rows are queries.
struct SLayout {
  static FLASHATTN_HD constexpr int count(int n) { return n; }
  static FLASHATTN_HD constexpr int element(int x) { return x; }
  static FLASHATTN_HD constexpr int query(int x) { return x / 2 % 2 * 8; }
  static FLASHATTN_HD constexpr int key(int x) { return x / 4 * 8 + x % 2; }
};

// One of the two rows of S that a lane has.
struct SRowLayout {
  int half;
  static FLASHATTN_HD constexpr int count(int n) { return n / 2; }
  FLASHATTN_HD constexpr int element(int x) const { return x / 2 * 4 + half * 2 + x % 2; }
  static FLASHATTN_HD constexpr int query(int) { return 0; }
  static FLASHATTN_HD constexpr int key(int x) { return x / 2 * 8 + x % 2; }
};

// S^T = K Q^T: rows are keys. Of a part of a tile: how far its first query and key are from the
// lane's first.
struct StLayout {
  int first_query = 0, first_key = 0;
  static FLASHATTN_HD constexpr int count(int n) { return n; }
  static FLASHATTN_HD constexpr int element(int x) { return x; }
  FLASHATTN_HD constexpr int query(int x) const { return first_query + x / 4 * 8 + x % 2; }
  FLASHATTN_HD constexpr int key(int x) const { return first_key + x / 2 % 2 * 8; }
};

// A strip as a fragment.
template <int kMmaN>
__device__ __forceinline__ float (&flat(float (&strip)[kMmaN][4]))[kMmaN * 4] {
  return reinterpret_cast<float (&)[kMmaN * 4]>(strip);
}

}  // namespace flashattn::cuda
