// Runs the backward passes of plans on a GPU.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda {

// OK when the kernels can read and write the arrays.
int32_t check_backward_arrays(const Problem& problem, const BackwardArgs& args);

// dO in the problem's dtype: the caller's, or where a copy will lie in the workspace.
flashattn_tensor rounded_dout(const Problem& problem, const BackwardArgs& args,
                              WorkspaceCutter* workspace);

// The gradient of a dense bias, where it is asked for.
class Dbias {
 public:
  Dbias(const Problem& problem, int32_t units);

  // Of both backends, which leave it lse2, delta and dout.
  int32_t run(const BackwardParams& params, cudaStream_t stream) const;

 private:
  ReadyKernel<sm80::BackwardEntry> kernel_;  // entry NULL: not asked for
};

class BackwardLauncher {
 public:
  // passed_over: why another backend does not serve, a few words for each reason there may be.
  BackwardLauncher(const Problem& problem, const Device& device, int64_t l2_bytes,
                   const std::vector<std::string>& passed_over);

  int64_t workspace(const Shape& shape) const;
  // For one of the reasons.
  void describe(size_t passed_over, flashattn_plan_properties* properties) const;
  // The device is current.
  int32_t run(const BackwardArgs& args, void* workspace, cudaStream_t stream) const;

  // Bytes of shared memory a block that the problem's kernels need on a device with so many. 0:
  // this build has no such kernels.
  static int32_t shared_bytes(const Problem& problem, int32_t shared_memory);

 private:
  bool ordered() const { return problem_.determinism != FLASHATTN_DETERMINISM_DEFAULT; }
  // Everything; with a NULL base, all but the pointers. *bytes: of the workspace.
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
