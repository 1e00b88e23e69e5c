// Stream-K of the Hopper forward rows: which tiles of a shape are split, and the launch of both
// kernels. See kernels/sm90/fwd_stream_k.cuh.
#pragma once

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class ForwardStreamK {
 public:
  ForwardStreamK(const Problem& problem, const Device& device);

  // Turns stream-K off if `bytes`, the largest workspace of the row, exceeds workspace_limit.
  void keep_within_limit(int64_t bytes);

  // The work items of a shape, if all sequences have all its keys and queries.
  StreamK work_items(const ForwardEntry& entry, const Shape& shape) const;
  // The most fp32 numbers of partial results that this shape or a smaller one needs.
  int64_t partial_floats(const ForwardEntry& entry, const Shape& shape) const;
  // The clause about stream-K in plan_info's `why`, which begins with a comma; empty without it.
  const char* describe(const ForwardEntry& entry, const Shape& shape) const;

  // Launches the kernel and, where it splits tiles, the combine kernel. *params: from
  // make_forward_params(). partial_o: partial_floats() numbers.
  int32_t launch(const ReadyKernel<ForwardEntry>& kernel, ForwardParams* params,
                 TileCounter* counter, float* partial_o, cudaStream_t stream) const;

 private:
  const Problem problem_;
  const int32_t multiprocessors_;
  bool is_on_, lacks_workspace_ = false;
  bool combine_starts_early_ = false;  // whether the combine kernel may launch early (PDL)
};

}  // namespace flashattn::cuda::sm90
