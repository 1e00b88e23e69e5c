// Predicates of the Hopper backend. The portable backend, next in preference, takes the rest.
#include <cstdio>

#include "core/validate_desc.h"
#include "cuda/host/backend.h"
#include "cuda/host/launcher.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/sm90_packed.h"
#include "cuda/host/tensor_map.h"

namespace flashattn {
namespace {

using cuda::sm90::is_hopper, cuda::sm90::kMinBlock, cuda::sm90::kPageStep;

const Predicate kPredicates[] = {
    {is_refused_by_portable, FLASHATTN_REASON_NOT_IN_THIS_BUILD, "device",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "the portable kernels, which this backend needs, refuse");
     },
     true},
    {[](const Problem&, const Device& d) { return !is_hopper(d); }, FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity, "compute capability %d.%d is not Hopper's 9.0",
                     d.properties.compute_capability / 10, d.properties.compute_capability % 10);
     }},
    {[](const Problem&, const Device& d) { return is_hopper(d) && !cuda::sm90::has_code(d.index); },
     FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "the driver does not run this build's code for sm_90a; install a later one");
     }},
    {[](const Problem&, const Device&) { return !cuda::sm90::has_tensor_maps(); },
     FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "the driver has no cuTensorMapEncodeTiled; install 525 or later");
     }},
    {[](const Problem& p, const Device&) { return !cuda::sm90::takes_dims(p); },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "dtype = %s, dim_qk = %d, dim_v = %d have no Hopper kernel with mask = %u, bias "
           "= %u, dropout = %g, scale = %g",
           dtype_name(p.dtype), p.dim_qk, p.dim_v, p.mask, p.bias, static_cast<double>(p.dropout),
           static_cast<double>(p.scale));
     }},
    {[](const Problem& p, const Device&) { return cuda::sm90::has_fine_blocks(p); },
     FLASHATTN_REASON_VALUE, "block_q",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "block_q = %d, block_kv = %d, of which each must be %d at least and block_kv a "
           "multiple of 8",
           p.block_q, p.block_kv, kMinBlock);
     }},
    {[](const Problem& p, const Device&) {
       const char* why_not = nullptr;  // kernels with packed heads take trees
       return p.has_mask(kKeyBitMasks) &&
              !cuda::sm90::PackedForwardKernels::supports_problem(p, &why_not);
     },
     FLASHATTN_REASON_MASK_COMBINATION, "mask",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "mask has %s",
                     p.has_mask(FLASHATTN_MASK_TREE) ? "TREE" : "PAGES");
     }},
    {[](const Problem& p, const Device&) { return p.splits > 1; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "splits",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "splits = %d is above 1", p.splits);
     }},
    {[](const Problem& p, const Device&) {
       return p.determinism == FLASHATTN_DETERMINISM_BATCH_INVARIANT;
     },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "determinism",
     [](const Problem&, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "BATCH_INVARIANT keeps one kernel for all lengths");
     }},
    {[](const Problem& p, const Device&) {
       return p.dtype_kv == p.dtype && cuda::sm90::has_odd_pages(p);
     },
     FLASHATTN_REASON_VALUE, "page_size",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "page_size = %d is no multiple of %d", p.page_size, kPageStep);
     }},
};

std::unique_ptr<Launcher> make_launcher(const Problem& problem, const Device& device,
                                        const std::string& passed_over) {
  return std::unique_ptr<Launcher>(new cuda::CudaLauncher(problem, device, "sm90", passed_over));
}

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = {"sm90", FLASHATTN_DEVICE_CUDA, kPredicates,
                                  sizeof kPredicates / sizeof *kPredicates, make_launcher};
  return backend;
}

}  // namespace flashattn
