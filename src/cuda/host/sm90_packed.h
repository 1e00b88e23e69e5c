// The Hopper forward kernels that pack the query heads of a KV head into a Q tile and split keys:
// for queries that do not fill tiles by themselves, beside many keys.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/schedule/split_kv.h"
#include "cuda/host/sm90_fwd.h"

namespace flashattn::cuda::sm90 {

class PackedForwardKernels final : public ForwardRow {
 public:
  // See Registration::supports.
  static bool supports_problem(const Problem& problem, const char** why_not);

  PackedForwardKernels(const Problem& problem, const Device& device);

  const char* title() const override { return "Hopper kernels with packed heads"; }
  bool supports(const Shape& shape, const char** why_not) const override;
  RowCost cost(const Shape& shape) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  // The kernel with the fewest warpgroups whose tile takes all rows of a KV head; if none does, the
  // largest.
  const NamedKernel& choose(const Shape& shape) const;
  // Rows of a KV head of a sequence, with its query heads rounded up to a power of two.
  int64_t rows(const Shape& shape) const;
  PackedTiling packed_tiling(const ReadyKernel<ForwardEntry>& kernel) const;
  // The packed heads of a shape, without their arrays; *swizzle: the order of work tiles.
  PackedHeads grid(const ReadyKernel<ForwardEntry>& kernel, const Shape& shape,
                   L2Swizzle* swizzle) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  const int64_t l2_bytes_;
  int32_t log2_group_ = 0;
  std::vector<NamedKernel> kernels_;   // in order of tile_q
  bool combine_starts_early_ = false;  // whether the combine kernel may launch early (PDL)
};

}  // namespace flashattn::cuda::sm90
