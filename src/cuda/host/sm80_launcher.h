// Launches the portable kernels of a plan.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/host/sm80_backward_launcher.h"
#include "cuda/host/driver.h"

namespace flashattn::cuda {

// The reasons for which the Hopper kernels may not serve, and `why` for a forward pass of unknown
// shape.
struct PassedOver {
  std::vector<std::string> forward, backward;
  std::string undecided;
};

class Sm80Launcher : public Launcher {
 public:
  Sm80Launcher(const Problem& problem, const Device& device, const PassedOver& passed_over);

  int64_t workspace(uint32_t op, const Shape& shape) const override;
  void describe(uint32_t op, const Shape& shape,
                flashattn_plan_properties* properties) const override;
  // Unknown sizes are replaced by sizes that fill the device.
  void describe_maxima(uint32_t op, const Shape& maxima,
                       flashattn_plan_properties* properties) const override;
  int32_t forward(const ForwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t merge(const MergeArgs& args, const Executor& on) const override;
  int32_t dropout_mask(const ForwardArgs& args, uint8_t* keep, const Executor& on) const override;

 protected:
  // Returns OK if the kernels can read and write the arrays.
  int32_t check_arrays(const ForwardArgs& args) const;
  // passed_over: index of the reason that applies.
  void describe_forward(const Shape& shape, size_t passed_over,
                        flashattn_plan_properties* properties) const;
  void describe_backward(size_t passed_over, flashattn_plan_properties* properties) const {
    backward_->describe(passed_over, properties);
  }
  // Whether all CTAs of a portable forward pass run at once.
  bool fits_at_once(const Shape& shape) const;

  const Problem problem_;
  const int32_t device_, multiprocessors_;
  const int64_t l2_bytes_;
  const std::string undecided_;  // `why` if the shape is unknown
  std::unique_ptr<const PlanContext> context_;

 private:
  // A kernel that the plan may choose by the shape of a call.
  struct Forward {
    ReadyKernel<sm80::ForwardEntry> kernel;
    std::string name;
    std::vector<std::string> why;  // by the reason that passed_over gives
  };

  // Returns OK if row_grid() may have so many heads.
  int32_t check_heads(int64_t batch) const { return check_grid(batch * problem_.heads_q); }
  // All parameters except the arguments and the workspace.
  ForwardParams grid(const ReadyKernel<sm80::ForwardEntry>& choice, const Shape& shape) const;
  const Forward& choose(const Shape& shape) const;
  // Whether there are more than a few sequences and their lengths may differ much. With one CTA
  // each, most multiprocessors would then wait for the longest.
  bool may_be_uneven(const Shape& shape) const;
  // Whether keys are packed or paged, so that every sequence has its own number of keys.
  bool has_lengths() const;

  Forward deep_, shallow_, tiny_, small_, medium_, large_;  // by the number of queries and blocks
  bool starts_early_;  // whether the merge of a split forward may launch early (PDL)
  std::unique_ptr<const BackwardLauncher> backward_;  // NULL: the plan has no backward
};

// Shared memory that a CTA of the problem's kernels needs, in bytes, on a device that offers
// shared_memory bytes. 0: this build has no such kernel.
int32_t sm80_shared_bytes(const Problem& problem, int32_t shared_memory);

// Whether the driver has code of the portable kernels for the device; one kernel stands for all.
bool sm80_has_code(int32_t device);

}  // namespace flashattn::cuda
