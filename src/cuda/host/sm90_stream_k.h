// Stream-K of the Hopper forward rows: which tiles of a shape are split, and the memory for their
// parts. See kernels/sm90/fwd_stream_k.cuh.
#pragma once

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class ForwardStreamK {
 public:
  ForwardStreamK(const Problem& problem, const Device& device);

  // Turns it off where a row would need more than workspace_limit; bytes: what it needs at most.
  void keep_within_limit(int64_t bytes);

  // The work items of a shape, if all sequences have all its keys and queries.
  StreamK work_items(const ForwardEntry& entry, const Shape& shape) const;
  // What plan_info says of a shape: nothing, or a clause that begins with a comma.
  const char* describe(const ForwardEntry& entry, const Shape& shape) const;

  // Takes memory for the parts of this shape or of a smaller one.
  void take(const ForwardEntry& entry, const Shape& shape, WorkspaceAllocator* memory,
            ForwardParams* params) const;
  // Splits the tiles of a call. *params: of make_forward_params().
  void split(const ForwardEntry& entry, ForwardParams* params) const;

 private:
  bool is_on(const ForwardEntry& entry) const { return is_on_ && entry.uses_stream_k; }

  const Problem problem_;
  const int32_t multiprocessors_;
  bool is_on_, lacks_workspace_ = false;
};

}  // namespace flashattn::cuda::sm90
