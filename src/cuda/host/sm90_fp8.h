// The Hopper forward kernels for q, k and v in E4M3.
#pragma once

#include <string>
#include <vector>

#include "cuda/host/kernel_row.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/sm90_stream_k.h"
#include "cuda/kernels/sm90/fp8_transpose_v.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

// Two rows, which give the same bits. transposes_v: kernels that transpose V tile by tile; else V^T
// is written to the workspace before.
class Fp8ForwardKernels final : public ForwardRow {
 public:
  Fp8ForwardKernels(const Problem& problem, const Device& device, bool transposes_v);

  // Whether the row has a kernel for the problem.
  template <bool kTransposesV>
  static bool supports_problem(const Problem& problem, const char** why_not);

  const char* title() const override;
  bool supports(const Shape&, const char**) const override { return true; }
  RowCost cost(const Shape& shape) const override;
  int64_t workspace(const Shape& shape) const override;
  std::string describe(const Shape& shape, flashattn_plan_properties* properties) const override;
  int32_t launch(const ForwardArgs& args, void* workspace, cudaStream_t stream) const override;

 private:
  struct Arrays {  // in the workspace
    TileCounter* counter;
    uint8_t* v_transposed;
    HalfDescales* half_descales;
    float* largest_descale_v;
    float* partial_o;
  };
  Arrays arrays(const Shape& shape, WorkspaceAllocator* memory) const;
  bool has_block_descales() const {
    return kernel_.entry->score_mod == ScoreModKind::kBlockDescales;
  }
  int32_t launch_columns(const Problem& problem, const ForwardArgs& args, void* workspace,
                         cudaStream_t stream) const;
  int32_t transpose_v(const Problem& problem, const ForwardArgs& args, const Arrays& to,
                      cudaStream_t stream) const;

  const Problem problem_;
  const int64_t l2_bytes_;
  ReadyKernel<ForwardEntry> kernel_;
  TransposeVKernel transpose_v_;
  std::string name_;
  const SoftcapPolynomials softcap_;
  ForwardStreamK stream_k_;
};

// Entries whose dtype is that of o.
Table<ForwardEntry> fp8_forward_table();

// Whether a kernel of this build takes the problem's dims.
bool takes_fp8(const Problem& problem);

}  // namespace flashattn::cuda::sm90
