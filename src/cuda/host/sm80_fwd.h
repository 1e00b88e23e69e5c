// The portable forward kernels of a plan: prefill, decode, split-KV.
#pragma once

#include <string>

#include "cuda/host/kernel_row.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/schedule/split_kv.h"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda::sm80 {

class ForwardKernels final : public ForwardRow {
 public:
  ForwardKernels(const Problem& problem, const Device& device);

  const char* title() const override { return "portable kernels"; }
  bool supports(const Shape&, const char**) const override { return true; }
  RowCost cost(const Shape& shape) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  struct Kernel {
    ReadyKernel<ForwardEntry> kernel;
    std::string name, why;
  };

  // All parameters except the arguments and the workspace.
  ForwardParams grid(const ReadyKernel<ForwardEntry>& choice, const Shape& shape) const;
  const Kernel& choose(const Shape& shape) const;
  // The entry that merges in clusters, as it is launched.
  ForwardEntry merging(const ForwardEntry& entry, const ForwardParams& p, const Shape& shape) const;
  // Whether the kernel is a decode kernel of 32 or 64 rows, and the fastest one for the shape.
  bool pays_to_decode(const Kernel& choice, const Shape& shape) const;
  bool is_uneven(const Shape& shape) const;  // see may_be_uneven()

  const Problem problem_;
  const int32_t multiprocessors_, shared_memory_;
  const int64_t l2_bytes_;
  // choose() picks one by the numbers of queries and CTAs.
  Kernel deep_, shallow_, rows32_, rows64_, tiny_, small_, medium_, large_;
  bool combine_starts_early_;          // whether the combine kernel may launch early (PDL)
  ClusterLimits cluster_limits_ = {};  // limits of deep_
};

// Shared memory that a CTA of the problem's kernels needs, in bytes, on a device that offers
// shared_memory bytes. 0: this build has no such kernel.
int32_t shared_bytes(const Problem& problem, int32_t shared_memory);

// Whether the driver has code of the portable kernels for the device; one kernel stands for all.
bool has_code(int32_t device);

}  // namespace flashattn::cuda::sm80
