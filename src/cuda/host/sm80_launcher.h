// Runs plans on a GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/host/sm80_backward_launcher.h"
#include "cuda/host/driver.h"

namespace flashattn::cuda {

// Why another backend does not serve, a few words for each reason there may be; and which backends'
// kernels a forward pass of unknown shape may run.
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
  // The kernel of a shape that fills the device, as far as nothing else is maxima.
  void describe_maxima(uint32_t op, const Shape& maxima,
                       flashattn_plan_properties* properties) const override;
  int32_t forward(const ForwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t merge(const MergeArgs& args, const Executor& on) const override;
  int32_t dropout_mask(const ForwardArgs& args, uint8_t* keep, const Executor& on) const override;

 protected:
  // OK when the kernels can read and write the arrays.
  int32_t check_arrays(const ForwardArgs& args) const;
  // Of a portable forward pass, for one of the reasons.
  void describe_forward(const Shape& shape, size_t passed_over,
                        flashattn_plan_properties* properties) const;
  void describe_backward(size_t passed_over, flashattn_plan_properties* properties) const {
    backward_->describe(passed_over, properties);
  }
  // Whether the device holds all blocks of a portable forward pass at once.
  bool fits_at_once(const Shape& shape) const;

  const Problem problem_;
  const int32_t device_, multiprocessors_;
  const int64_t l2_bytes_;
  const std::string undecided_;  // why, of a shape that is not known
  std::unique_ptr<const PlanContext> context_;

 private:
  // The kernels that the plan may choose from by the shape of a call.
  struct Forward {
    ReadyKernel<sm80::ForwardEntry> kernel;
    std::string name;
    std::vector<std::string> why;  // by what the backend was chosen for
  };

  // OK when the small kernels' grids may have so many, see row_grid().
  int32_t check_heads(int64_t batch) const { return check_grid(batch * problem_.heads_q); }
  // Everything but the arguments and the workspace.
  ForwardParams grid(const ReadyKernel<sm80::ForwardEntry>& choice, const Shape& shape) const;
  const Forward& choose(const Shape& shape) const;
  // Whether sequences, more than a few of them, may have keys of very different number: one block
  // each would leave most multiprocessors waiting for the longest.
  bool may_be_uneven(const Shape& shape) const;
  // Whether keys are packed or paged, each sequence's of a number of its own.
  bool has_lengths() const;

  Forward deep_, shallow_, tiny_, small_, medium_, large_;  // by the number of queries and blocks
  bool starts_early_;  // whether the merge of a split forward waits for it by itself
  std::unique_ptr<const BackwardLauncher> backward_;  // NULL: not asked for
};

// Bytes of shared memory a block that the problem's kernels need on a device with so many. 0: this
// build has no such kernels.
int32_t sm80_shared_bytes(const Problem& problem, int32_t shared_memory);

// Whether the device can run the portable kernels as they were compiled: one for all.
bool sm80_has_code(int32_t device);

}  // namespace flashattn::cuda
