// Launches the portable backward pass.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda {

// Returns OK if the kernels can read and write the arrays.
int32_t check_backward_arrays(const Problem& problem, const BackwardArgs& args);

// dO in the problem's dtype: the caller's array, or a copy in the workspace.
flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceCutter* workspace);

// Launches the kernel for the gradient of a dense bias.
class Dbias {
 public:
  Dbias(const Problem& problem, int32_t multiprocessors);

  // After the main kernel of either backend, which leaves lse2, delta and dout.
  int32_t run(const BackwardParams& params, cudaStream_t stream) const;

 private:
  ReadyKernel<sm80::BackwardEntry> kernel_;  // entry NULL: the plan has no dbias
};

class BackwardLauncher {
 public:
  // passed_over: the reasons for which the Hopper kernels may not serve.
  BackwardLauncher(const Problem& problem, const Device& device, int64_t l2_bytes,
                   const std::vector<std::string>& passed_over);

  int64_t workspace(const Shape& shape) const;
  // passed_over: index of the reason that applies.
  void describe(size_t passed_over, flashattn_plan_properties* properties) const;
  // The device must be current.
  int32_t run(const BackwardArgs& args, void* workspace, cudaStream_t stream) const;

  // Shared memory that a CTA of the problem's kernels needs, in bytes, on a device that offers
  // shared_memory bytes. 0: this build has no such kernel.
  static int32_t shared_bytes(const Problem& problem, int32_t shared_memory);

 private:
  bool ordered() const { return problem_.determinism != FLASHATTN_DETERMINISM_DEFAULT; }
  // All parameters; with a NULL base, all except pointers. *bytes: the size of the workspace.
  BackwardParams params(const BackwardArgs& args, char* base, int64_t* bytes) const;

  const Problem problem_;
  const int64_t l2_bytes_;
  const int32_t multiprocessors_;
  ReadyKernel<sm80::BackwardEntry> main_;
  const Dbias dbias_;
  std::string name_;
  std::vector<std::string> why_;
};

}  // namespace flashattn::cuda
