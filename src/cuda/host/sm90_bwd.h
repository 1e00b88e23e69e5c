// The Hopper backward kernels of a plan.
#pragma once

#include <string>

#include "cuda/host/bwd_common.h"
#include "cuda/host/kernel_row.h"
#include "cuda/host/sm90_dbias.h"
#include "cuda/kernels/sm90/bwd_preprocess.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class BackwardKernels final : public BackwardRow {
 public:
  // See Registration::supports.
  static bool supports(const Problem& problem, const char** why_not);

  // See Registration::supports: whether there are kernels of kDenseBias for the problem.
  static bool supports_dense_bias(const Problem& problem, const char** why_not);

  BackwardKernels(const Problem& problem, const Device& device);
  // With kernels of one kind.
  BackwardKernels(const Problem& problem, const Device& device, ScoreModKind kind);

  const char* title() const override { return "Hopper kernels"; }
  bool supports(const Shape& shape, const char** why_not) const override;
  bool accepts(const BackwardArgs& args) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const BackwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  struct Kernel {
    ReadyKernel<BackwardEntry> choice;  // entry NULL: there is none
    std::string name;
  };

  bool ordered() const { return problem_.determinism != FLASHATTN_DETERMINISM_DEFAULT; }
  Kernel make(const BackwardEntry* entry) const;
  const Kernel& choose(const Shape& shape) const;
  // The number of query heads that the first KV tiles of all CTAs need.
  int64_t first_heads(const L2Swizzle& swizzle) const;
  // Whether the kernel starts before preprocessing has ended.
  bool starts_early(const BackwardEntry& entry, const BackwardArgs& args,
                    const BackwardParams& p) const;
  // Whether the backward kernel adds up dbias itself; else hopper_dbias_ or dbias_ does.
  bool adds_dbias(const BackwardArgs& args) const;
  // All parameters except tensor maps; with a NULL base, no pointers either. *bytes: the workspace.
  BackwardParams params(const BackwardEntry& entry, const BackwardArgs& args, char* base,
                        int64_t* bytes) const;
  // The parameters of the preprocessing for a kernel that starts early, except tensor maps.
  BwdPreprocessParams preprocess_params(const BackwardParams& p) const;
  int32_t make_maps(const BackwardEntry& entry, BackwardParams* p,
                    BwdPreprocessParams* preprocess) const;
  int32_t launch_preprocess(const BackwardEntry& entry, const BackwardParams& p,
                            const BwdPreprocessParams& preprocess, cudaStream_t stream) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  const int64_t l2_bytes_;
  const Kernel main_, two_warpgroup_;  // two_warpgroup_: the two-warpgroup kernel, for many queries
  const Dbias dbias_;
  const DbiasKernel hopper_dbias_;
  const SoftcapWithDerivative softcap_;
};

}  // namespace flashattn::cuda::sm90
