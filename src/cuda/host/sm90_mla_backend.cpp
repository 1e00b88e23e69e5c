// Predicates of the Hopper backend for latent attention. The portable backend, next in preference,
// takes the rest.
#include <cstdio>

#include "core/score_mod.h"
#include "core/validate_desc.h"
#include "cuda/host/backend.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/host/launcher.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/sm90_mla.h"
#include "cuda/host/tensor_map.h"

namespace flashattn {
namespace {

// TREE and PAGES only hide keys; they do not modify scores.
bool has_modified_scores(const Problem& p) { return (modifications(p) & ~kModKeyBits) != 0; }

// Whether the portable kernels refuse what this backend leaves to them. They know no LATENT_KV, and
// are asked as if the cache had the type of q.
bool is_refused(const Problem& problem, const Device& device) {
  Problem p = problem;
  if (p.is_latent()) {
    p.layout &= ~static_cast<uint32_t>(FLASHATTN_LAYOUT_LATENT_KV);
    p.dtype_kv = p.dtype;
  }
  return is_refused_by_portable(p, device);
}

const Predicate kPredicates[] = {
    {is_refused, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "device",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "the portable kernels, which this backend needs, refuse");
     },
     true},
    {[](const Problem& p, const Device&) { return !cuda::sm90::takes_mla(p); },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype = %s, dim_qk = %d, dim_v = %d are not of latent attention: 16 bits, "
                     "dim_qk above 256, dim_v at most dim_qk",
                     dtype_name(p.dtype), p.dim_qk, p.dim_v);
     },
     true},
    {[](const Problem&, const Device& d) {
       return !cuda::sm90::is_hopper(d) || !cuda::sm90::has_code(d.index) ||
              !cuda::sm90::has_tensor_maps();
     },
     FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "the device, of compute capability %d.%d, or its driver runs no code for "
                     "sm_90a",
                     d.properties.compute_capability / 10, d.properties.compute_capability % 10);
     },
     true},
    {[](const Problem& p, const Device&) { return p.dtype_o == FLASHATTN_DTYPE_F8E4M3; },
     FLASHATTN_REASON_DTYPE, "dtype_o",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype_o = %s beside layout bit LATENT_KV is computed on the CPU only; use %s "
                     "or FLASHATTN_DTYPE_F32",
                     dtype_name(p.dtype_o), dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return p.has_op(FLASHATTN_OP_BACKWARD); },
     FLASHATTN_REASON_OP, "ops",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "ops has BACKWARD, with dim_qk = %d", p.dim_qk);
     },
     true},
    {[](const Problem& p, const Device&) { return has_modified_scores(p); },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "mask",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "softcap = %g, bias = %u, dropout = %g, mask = %u, scale = %g: scores of "
                     "latent attention are only scaled, and masked by position",
                     static_cast<double>(p.softcap), p.bias, static_cast<double>(p.dropout), p.mask,
                     static_cast<double>(p.scale));
     },
     true},
};

std::unique_ptr<Launcher> make_launcher(const Problem& problem, const Device& device,
                                        const std::string&) {
  // No other Hopper kernel is for these heads: there is nothing to say of the backends before.
  return std::unique_ptr<Launcher>(new cuda::CudaLauncher(problem, device, "sm90_mla", ""));
}

}  // namespace

const Backend& cuda_sm90_mla_backend() {
  static const Backend backend = {"sm90_mla", FLASHATTN_DEVICE_CUDA, kPredicates,
                                  sizeof kPredicates / sizeof *kPredicates, make_launcher};
  return backend;
}

}  // namespace flashattn
