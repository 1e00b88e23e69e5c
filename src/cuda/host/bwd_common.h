// Shared by the backward rows: dO in the problem's dtype, and the gradients of bias and sink.
#pragma once

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda {

// dO in the problem's dtype: the caller's array, or a copy in the workspace.
flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceAllocator* workspace);

// The kernels for the gradient of a dense bias.
class Dbias {
 public:
  Dbias(const Problem& problem, const Device& device);

  // The number of int32 counters that let several CTAs share a tile of dbias.
  int32_t counters() const;

  // Launches the gradients of bias and sink that the call asks for, after a backward kernel of any
  // row, which leaves lse2, delta and dout. has_counters: the last counters() of the params'
  // arrived_count are this class's, and 0.
  int32_t launch_with_dsink(const BackwardParams& params, cudaStream_t stream,
                            bool has_counters = false) const;

  // Shared memory of a CTA, in bytes, on a device that offers shared_memory bytes. 0: this build
  // has no such kernel.
  static int32_t shared_bytes(const Problem& problem, int32_t shared_memory);

 private:
  using Kernel = ReadyKernel<sm80::DbiasEntry>;

  int32_t launch_dbias(const BackwardParams& params, cudaStream_t stream, bool has_counters) const;

  Kernel kernel_;  // entry NULL: the plan has no dbias
  Kernel dense_;   // for a bias that is the same for all that dbias sums; entry NULL: there is none
};

}  // namespace flashattn::cuda
