// The backward pass where q, k and v are E4M3: the 16-bit kernels, on copies in the workspace.
#pragma once

#include <string>

#include "cuda/host/launcher.h"

namespace flashattn::cuda::sm90 {

class Fp8BackwardRow final : public BackwardRow {
 public:
  Fp8BackwardRow(const Problem& problem, const Device& device);

  // The problem of the 16-bit kernels.
  static Problem in_16_bits(const Problem& problem);

  const char* title() const override { return "16-bit kernels"; }
  bool supports(const Shape&, const char**) const override { return true; }
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const BackwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  // Arrays in the workspace. Gradients that the kernels write in place have no data.
  struct Copies {
    flashattn_tensor q, k, v, dq, dk, dv;
    int64_t bytes;
  };
  Copies copies(const Shape& shape, void* base) const;

  const Problem problem_, in_16_bits_;
  PlanRows<BackwardRow> rows_;
};

}  // namespace flashattn::cuda::sm90
