// The portable backward kernels of a plan.
#pragma once

#include <string>

#include "cuda/host/bwd_common.h"
#include "cuda/host/kernel_row.h"

namespace flashattn::cuda::sm80 {

class BackwardKernels final : public BackwardRow {
 public:
  BackwardKernels(const Problem& problem, const Device& device);

  const char* title() const override { return "portable kernels"; }
  bool supports(const Shape&, const char**) const override { return true; }
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const BackwardArgs& args, void* workspace, cudaStream_t stream) const override;

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
  ReadyKernel<BackwardEntry> main_;
  const Dbias dbias_;
  const std::string name_;
};

}  // namespace flashattn::cuda::sm80
