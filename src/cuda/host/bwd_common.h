// Shared by the backward rows: dO in the problem's dtype, and the gradients of bias and sink.
#pragma once

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda {

// dO in the problem's dtype: the caller's array, or a copy in the workspace.
flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceAllocator* workspace);

// The kernel for the gradient of a dense bias.
class Dbias {
 public:
  Dbias(const Problem& problem, const Device& device);

  // Launches the gradients of bias and sink that the call asks for, after a backward kernel of any
  // row, which leaves lse2, delta and dout.
  int32_t launch_with_dsink(const BackwardParams& params, cudaStream_t stream) const;

  // Shared memory of a CTA, in bytes, on a device that offers shared_memory bytes. 0: this build
  // has no such kernel.
  static int32_t shared_bytes(const Problem& problem, int32_t shared_memory);

 private:
  int32_t launch_dbias(const BackwardParams& params, cudaStream_t stream) const;

  ReadyKernel<sm80::BackwardEntry> kernel_;  // entry NULL: the plan has no dbias
};

}  // namespace flashattn::cuda
