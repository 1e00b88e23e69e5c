// The Hopper kernel for latent attention: one KV head for many query heads, V the first columns of
// K. Calls with another V run on the portable kernels. Also for the quantised cache of LATENT_KV.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_row.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

class MlaKernels final : public ForwardRow {
 public:
  MlaKernels(const Problem& problem, const Device& device);

  const char* title() const override { return "Hopper kernel for latent attention"; }
  bool supports(const Shape& shape, const char** why_not) const override;
  bool accepts(const ForwardArgs& args) const override;
  // Below that of short sequences on portable kernels, too: their tiles for these heads are small.
  RowCost cost(const Shape&) const override { return {0.3, nullptr}; }
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  // All parameters except the arguments, the workspace and the tensor map.
  MlaParams grid(const Shape& shape) const;
  int64_t rows(const Shape& shape) const;  // rows of a KV head of the longest sequence
  int64_t ctas(const MlaParams& params, const Shape& shape) const;

  struct Kernel {
    ReadyKernel<MlaEntry> ready;
    std::string name;
  };
  // The one whose tile has the fewest rows, but all of a sequence's KV head; or the largest.
  const Kernel& kernel(const Shape& shape) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  std::vector<Kernel> kernels_;  // in ascending order of tile_q
  bool combine_starts_early_;    // whether the combine kernel may launch early (PDL)
};

// Whether a kernel of this build takes the problem's dtype and dims, which no other Hopper kernel
// takes.
bool takes_mla(const Problem& problem);

}  // namespace flashattn::cuda::sm90
