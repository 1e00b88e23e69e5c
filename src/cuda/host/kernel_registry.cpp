// The rows of the registry: Hopper kernels before portable ones.
#include "cuda/host/kernel_registry.h"

#include "cuda/host/sm80_bwd.h"
#include "cuda/host/sm80_fwd.h"

#if FLASHATTN_CUDA_SM90
#include "cuda/host/sm90_bwd.h"
#include "cuda/host/sm90_fp8.h"
#include "cuda/host/sm90_fp8_bwd.h"
#include "cuda/host/sm90_fp8_cache.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/sm90_mla.h"
#include "cuda/host/sm90_packed.h"
#endif

namespace flashattn::cuda {
namespace {

bool always(const Problem&, const char**) { return true; }

bool is_not_latent(const Problem& problem, const char** why_not) {
  *why_not = "";
  return !problem.is_latent();
}

template <class Row, class Made>
std::unique_ptr<const Row> make(const Problem& problem, const Device& device) {
  return std::unique_ptr<const Row>(new Made(problem, device));
}

#if FLASHATTN_CUDA_SM90
bool has_one_type(const Problem& problem, const char** why_not) {
  *why_not = "";  // the rows for a cache of E4M3, or for trees, say why
  return problem.dtype_kv == problem.dtype && !problem.has_mask(FLASHATTN_MASK_TREE);
}

template <class Row, class Made>
std::unique_ptr<const Row> make_dense_bias(const Problem& problem, const Device& device) {
  return std::unique_ptr<const Row>(new Made(problem, device, sm90::ScoreModKind::kDenseBias));
}

template <bool kTransposesV>
std::unique_ptr<const ForwardRow> make_fp8(const Problem& problem, const Device& device) {
  return std::unique_ptr<const ForwardRow>(
      new sm90::Fp8ForwardKernels(problem, device, kTransposesV));
}
#endif

}  // namespace

Registry<ForwardRow> forward_registry() {
  static const Registration<ForwardRow> rows[] = {
#if FLASHATTN_CUDA_SM90
      {{"sm90"}, sm90::Fp8CacheRow::supports_problem, make<ForwardRow, sm90::Fp8CacheRow>},
      {{"sm90"},
       sm90::ForwardKernels::supports_dense_bias,
       make_dense_bias<ForwardRow, sm90::ForwardKernels>},
      {{"sm90"}, has_one_type, make<ForwardRow, sm90::ForwardKernels>},
      {{"sm90"},
       sm90::PackedForwardKernels::supports_problem,
       make<ForwardRow, sm90::PackedForwardKernels>},
      {{"sm90_mla"}, always, make<ForwardRow, sm90::MlaKernels>},
#endif
      {{"sm80", "sm90", "sm90_mla"}, is_not_latent, make<ForwardRow, sm80::ForwardKernels>},
#if FLASHATTN_CUDA_SM90
      {{"sm90_fp8"}, sm90::Fp8ForwardKernels::supports_problem<false>, make_fp8<false>},
      {{"sm90_fp8"}, sm90::Fp8ForwardKernels::supports_problem<true>, make_fp8<true>},
#endif
  };
  return {rows, sizeof rows / sizeof *rows};
}

Registry<BackwardRow> backward_registry() {
  static const Registration<BackwardRow> rows[] = {
#if FLASHATTN_CUDA_SM90
      {{"sm90"},
       sm90::BackwardKernels::supports_dense_bias,
       make_dense_bias<BackwardRow, sm90::BackwardKernels>},
      {{"sm90"}, sm90::BackwardKernels::supports, make<BackwardRow, sm90::BackwardKernels>},
#endif
      {{"sm80", "sm90"}, always, make<BackwardRow, sm80::BackwardKernels>},
#if FLASHATTN_CUDA_SM90
      {{"sm90_fp8"}, always, make<BackwardRow, sm90::Fp8BackwardRow>},
#endif
  };
  return {rows, sizeof rows / sizeof *rows};
}

}  // namespace flashattn::cuda
