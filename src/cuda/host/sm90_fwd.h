// The Hopper forward kernels of a plan. They serve shapes with queries enough to fill their tiles.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_row.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class ForwardKernels final : public ForwardRow {
 public:
  ForwardKernels(const Problem& problem, const Device& device);

  const char* title() const override { return "Hopper kernels"; }
  const char* declines(const Shape& shape, const ForwardRow* next) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  struct NamedKernel {
    ReadyKernel<ForwardEntry> kernel;
    std::string name;
  };

  // The cheapest kernel by the cost model.
  const NamedKernel& choose(const Shape& shape) const;
  L2Swizzle swizzle(const ReadyKernel<ForwardEntry>& kernel, const Shape& shape) const;
  int32_t make_maps(const ForwardArgs& args, const ForwardEntry& entry,
                    ForwardParams* params) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  const int64_t l2_bytes_;
  std::vector<NamedKernel> kernels_;
  const SoftcapPolynomials softcap_;
  const bool forced_;  // by FLASHATTN_BACKEND
};

// Whether a Hopper kernel takes the problem's dtype and dims.
bool takes_dims(const Problem& problem);

// Whether the driver has code of the Hopper kernels for the device; one kernel stands for all.
bool has_code(int32_t device);

}  // namespace flashattn::cuda::sm90
