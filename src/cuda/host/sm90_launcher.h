// Launches the kernels of a plan on a Hopper GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/host/kernel_setup.h"
#include "cuda/host/sm80_launcher.h"
#include "cuda/host/sm90_backward_launcher.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda {

// The Hopper kernels serve the forward pass if there are queries enough to fill tiles, and the
// backward pass if there is a kernel for it. The portable kernels serve everything else.
class Sm90Launcher final : public Sm80Launcher {
 public:
  Sm90Launcher(const Problem& problem, const Device& device);

  int64_t workspace(uint32_t op, const Shape& shape) const override;
  void describe(uint32_t op, const Shape& shape,
                flashattn_plan_properties* properties) const override;
  void describe_maxima(uint32_t op, const Shape& maxima,
                       flashattn_plan_properties* properties) const override;
  int32_t forward(const ForwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const override;

 private:
  struct NamedKernel {
    ReadyKernel<sm90::ForwardEntry> kernel;
    std::string name;
  };

  // Why the portable kernels suit a shape better; kNotAtAll: they do not.
  enum Portable { kNoKeys, kFewQueries, kShort, kFewTiles, kNotAtAll };
  Portable why_portable(const Shape& shape) const;
  enum PortableBackward { kNoKernel, kSlower, kEmpty, kManyTiles };
  PortableBackward why_portable_backward(const Shape& shape) const;
  static const PassedOver& reasons();
  // NULL: a portable kernel.
  const NamedKernel* choose(const Shape& shape) const;
  L2Swizzle swizzle(const ReadyKernel<sm90::ForwardEntry>& kernel, const Shape& shape) const;
  int32_t make_maps(const ForwardArgs& args, const sm90::ForwardEntry& entry,
                    sm90::ForwardParams* params) const;

  // Whether a Hopper kernel serves the backward pass.
  bool has_backward(const Shape& shape) const {
    return hopper_backward_ && hopper_backward_->takes(shape);
  }

  std::vector<NamedKernel> kernels_;
  std::unique_ptr<const sm90::BackwardLauncher>
      hopper_backward_;  // NULL: no kernel, or the plan has no backward
  const sm90::Softcap softcap_;
  const bool forced_;
};

// Whether a Hopper kernel takes the problem's dtype and dims.
bool sm90_takes_dims(const Problem& problem);

// As sm80_has_code, for the Hopper kernels.
bool sm90_has_code(int32_t device);

}  // namespace flashattn::cuda
