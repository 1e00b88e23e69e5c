// Layouts of accumulator fragments: which query and which key a lane's elements belong to.
//
// mma.sync and WGMMA lay out their results alike. Of 16 rows a lane has two: element 4 n + 2 h + e
// is of row lane / 4 + 8 h and column 8 n + 2 (lane % 4) + e. A fragment [n][4] of the portable
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

// S^T = K Q^T: rows are keys. first_query: offset of the fragment's first query from the lane's
// first query in the tile. kElementsPerMma: elements of one MMA of 16 keys, if the fragment has
// several, one after another.
template <int kElementsPerMma = 1 << 16>
struct StLayout {
  int first_query = 0;
  static FLASHATTN_HD constexpr int count(int n) { return n; }
  static FLASHATTN_HD constexpr int element(int x) { return x; }
  FLASHATTN_HD constexpr int query(int x) const {
    return first_query + x % kElementsPerMma / 4 * 8 + x % 2;
  }
  static FLASHATTN_HD constexpr int key(int x) { return x / kElementsPerMma * 16 + x / 2 % 2 * 8; }
  // Element y of a fragment of n elements, one query after the other, so that values computed for a
  // query are soon used up.
  static FLASHATTN_HD constexpr int by_query(int y, int n) {
    const int of_mma = n < kElementsPerMma ? n : kElementsPerMma, rows = n / of_mma * 2;
    return y % rows / 2 * of_mma + y / rows / 2 * 4 + y % 2 * 2 + y / rows % 2;
  }
};

// The score of one query and key.
struct SingleLayout {
  static FLASHATTN_HD constexpr int count(int n) { return n; }
  static FLASHATTN_HD constexpr int element(int x) { return x; }
  static FLASHATTN_HD constexpr int query(int) { return 0; }
  static FLASHATTN_HD constexpr int key(int) { return 0; }
  static FLASHATTN_HD constexpr int by_query(int y, int) { return y; }
};

// The fragment of one MMA, or of several, as one array.
template <int kMmaN>
__device__ __forceinline__ float (&flat(float (&s)[kMmaN][4]))[kMmaN * 4] {
  return reinterpret_cast<float (&)[kMmaN * 4]>(s);
}
template <int kMmaM, int kMmaN>
__device__ __forceinline__ float (&flat(float (&s)[kMmaM][kMmaN][4]))[kMmaM * kMmaN * 4] {
  return reinterpret_cast<float (&)[kMmaM * kMmaN * 4]>(s);
}

}  // namespace flashattn::cuda
