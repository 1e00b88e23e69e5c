// The Hopper forward kernels of a plan. They serve shapes with queries enough to fill their tiles.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_row.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/sm90_stream_k.h"
#include "cuda/host/softcap_fit.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

struct NamedKernel {
  ReadyKernel<ForwardEntry> kernel;
  std::string name;
};

class ForwardKernels final : public ForwardRow {
 public:
  ForwardKernels(const Problem& problem, const Device& device);
  // With kernels of one kind.
  ForwardKernels(const Problem& problem, const Device& device, ScoreModKind kind);

  // See Registration::supports: whether there are kernels of kDenseBias for the problem.
  static bool supports_dense_bias(const Problem& problem, const char** why_not);

  const char* title() const override { return "Hopper kernels"; }
  bool supports(const Shape& shape, const char** why_not) const override;
  bool accepts(const ForwardArgs& args) const override;
  RowCost cost(const Shape& shape) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  // Whether a Q tile for each query head is faster than tiles of the portable kernels, which pack
  // the few queries of all heads of a KV head. Only with many keys, and heads enough to fill the
  // device without splits.
  bool beats_packed_heads(const Shape& shape) const;
  // The cheapest kernel by the cost model.
  const NamedKernel& choose(const Shape& shape) const;

  const Problem problem_;
  const int32_t multiprocessors_;
  const int64_t l2_bytes_;
  std::vector<NamedKernel> kernels_;
  const SoftcapPolynomials softcap_;
  ForwardStreamK stream_k_;
};

// The score modification whose kernels compute a problem.
ScoreModKind score_mod_of(const Problem& problem);

// Fills the parameters of a call, except the tile counter. They must be 0 before, except packed
// heads and their swizzle. l2_bytes: see usable_l2_bytes(). Returns an enum flashattn_status.
int32_t make_forward_params(const Problem& problem, const ForwardArgs& args,
                            const ReadyKernel<ForwardEntry>& kernel, int64_t l2_bytes,
                            const SoftcapPolynomials& softcap, ForwardParams* params);

// Launches one CTA a tile or, where those fill the device, persistent CTAs, which share `counter`.
int32_t launch_forward(const ReadyKernel<ForwardEntry>& kernel, ForwardParams* params,
                       TileCounter* counter, cudaStream_t stream);

constexpr int32_t kMinBlock = 16;  // smallest block of a block mask; smaller ones are slow
constexpr int32_t kPageStep = 16;  // keys; divides the KV tile of every kernel

inline bool is_hopper(const Device& d) { return d.properties.compute_capability / 10 == 9; }
inline bool has_fine_blocks(const Problem& p) {
  return p.has_mask(FLASHATTN_MASK_BLOCKS) &&
         (p.block_q < kMinBlock || p.block_kv < kMinBlock || p.block_kv % 8 != 0);
}
inline bool has_odd_pages(const Problem& p) {
  return p.has_layout(FLASHATTN_LAYOUT_PAGED_KV) && p.page_size % kPageStep != 0;
}

// Whether a Hopper kernel takes the problem's dtype and dims.
bool takes_dims(const Problem& problem);

// Whether the driver has code of the Hopper kernels for the device; one kernel stands for all.
bool has_code(int32_t device);

}  // namespace flashattn::cuda::sm90
