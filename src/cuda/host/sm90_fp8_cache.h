// The forward pass where K and V are a cache of E4M3 beside q of 16 bits and queries are many: the
// 16-bit kernels, on copies of K and V in the workspace. If all copies do not fit, sequences take
// rounds: as many as fit are converted and computed, then the next ones.
#pragma once

#include <string>

#include "cuda/host/launcher.h"

namespace flashattn::cuda::sm90 {

class Fp8CacheRow final : public ForwardRow {
 public:
  Fp8CacheRow(const Problem& problem, const Device& device);

  // See Registration::supports.
  static bool supports_problem(const Problem& problem, const char** why_not);

  const char* title() const override { return "16-bit kernels"; }
  bool supports(const Shape& shape, const char** why_not) const override;
  bool accepts(const ForwardArgs& args) const override { return !args.amax_o.data; }
  RowCost cost(const Shape& shape) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  // Arrays in the workspace.
  struct Copies {
    flashattn_tensor k, v;
    int64_t bytes;
  };
  Copies copies(const Shape& shape, void* base) const;
  // How many sequences are converted and computed at a time. 0: the row cannot run the shape,
  // because not all copies fit and sequences cannot be computed in rounds, or in too many.
  int32_t sequences_at_once(const Shape& shape) const;
  int32_t launch_sequences(const ForwardArgs& args, void* workspace, cudaStream_t stream) const;
  // Whether the copies pay for sequences of so many queries.
  bool pays(int64_t queries) const;

  const Problem problem_, in_16_bits_;
  const bool forced_;       // FLASHATTN_BACKEND asks for the row
  const bool packs_heads_;  // the 16-bit kernels may pack query heads
  PlanRows<ForwardRow> rows_;
  int64_t most_bytes_;  // limit of the copies
};

}  // namespace flashattn::cuda::sm90
