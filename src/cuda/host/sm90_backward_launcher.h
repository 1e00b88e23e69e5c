// Runs the backward passes of plans on a Hopper GPU.
#pragma once

#include <string>

#include "cuda/host/sm80_backward_launcher.h"
#include "cuda/kernels/sm90/bwd_preprocess.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class BackwardLauncher {
 public:
  // Whether there is a kernel for it, and it is the better one; the portable backend does the rest.
  static bool has_kernel(const Problem& problem);
  static bool takes(const Problem& problem);

  BackwardLauncher(const Problem& problem, int32_t units, int64_t l2_bytes);

  // Whether it takes the shape too.
  bool takes(const Shape& shape) const;
  int64_t workspace(const Shape& shape) const;
  void describe(const Shape& shape, flashattn_plan_properties* properties) const;
  // The device is current.
  int32_t run(const BackwardArgs& args, void* workspace, cudaStream_t stream) const;

 private:
  struct Kernel {
    ReadyKernel<BackwardEntry> choice;  // entry NULL: there is none
    std::string name;
  };

  bool ordered() const { return problem_.determinism != FLASHATTN_DETERMINISM_DEFAULT; }
  Kernel make(const BackwardEntry* entry) const;
  const Kernel& kernel_for(const Shape& shape) const;
  // That the first tiles of keys of all blocks need.
  int64_t first_heads(const L2Swizzle& swizzle) const;
  // Whether the kernel starts before all is prepared.
  bool starts_early(const BackwardEntry& entry, const BackwardArgs& args,
                    const BackwardParams& p) const;
  // Everything but the maps; with a NULL base, all but the pointers. *bytes: of the workspace.
  BackwardParams params(const BackwardEntry& entry, const BackwardArgs& args, char* base,
                        int64_t* bytes) const;
  // Of a kernel that starts early, all but the maps.
  BwdPreprocessParams preparation(const BackwardParams& p) const;
  int32_t make_maps(const BackwardEntry& entry, BackwardParams* p,
                    BwdPreprocessParams* early) const;
  int32_t prepare(const BackwardParams& p, const BwdPreprocessParams& early,
                  cudaStream_t stream) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  const int64_t l2_bytes_;
  const Kernel main_, long_;  // the other for many queries
  const Dbias dbias_;
};

}  // namespace flashattn::cuda::sm90
