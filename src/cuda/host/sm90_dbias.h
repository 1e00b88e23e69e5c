// The Hopper kernel for the gradient of a dense bias, after a backward kernel of a Hopper row.
#pragma once

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

// Whether the backward kernel can add up dbias itself, see BackwardParams::adds_dbias. Kernels in
// clusters lack the registers.
inline bool can_add_dbias(const BackwardEntry& entry) {
  return entry.score_mod == ScoreModKind::kDenseBias && entry.cluster_size == 1;
}

class DbiasKernel {
 public:
  // backward: the row's backward kernel, whose tensor maps and row statistics this kernel uses.
  DbiasKernel(const Problem& problem, const Device& device, const BackwardEntry& backward);

  // Whether this kernel makes dbias of the call: dbias is not a sum over queries, and the bias is
  // the same for all that dbias sums.
  bool accepts(const BackwardArgs& args) const;

  // Whether this kernel is faster than a backward kernel that adds up dbias itself, in any order.
  bool beats_adding() const;

  // The number of int32 counters that must be 0 before the launch.
  int32_t counters() const;

  // p: parameters of the backward kernel. The last counters() of its arrived_count are this
  // kernel's.
  int32_t launch(BackwardParams p, cudaStream_t stream) const;

 private:
  const Problem& problem_;
  const int32_t multiprocessors_;
  const BackwardEntry* entry_;  // NULL: there is none for the problem
};

}  // namespace flashattn::cuda::sm90
