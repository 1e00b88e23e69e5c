// Predicates of the Hopper backend for q, k and v in E4M3.
#include <cstdio>

#include "core/validate_desc.h"
#include "cuda/host/backend.h"
#include "cuda/host/launcher.h"
#include "cuda/host/sm90_fp8.h"
#include "cuda/host/sm90_fp8_bwd.h"
#include "cuda/host/sm90_fwd.h"
#include "cuda/host/tensor_map.h"

namespace flashattn {
namespace {

constexpr int32_t kMaxDim = 256, kDimStep = 16;  // 16 bytes
using cuda::sm90::is_hopper, cuda::sm90::kMinBlock, cuda::sm90::kPageStep;

void explain_multiple(const char* field, int32_t value, char* text, size_t capacity) {
  std::snprintf(text, capacity,
                "%s = %d is no multiple of %d, as E4M3 wants it; pad the head to %d", field, value,
                kDimStep, (value + kDimStep - 1) / kDimStep * kDimStep);
}

const Predicate kPredicates[] = {
    {[](const Problem& p, const Device&) { return !p.has_8bit_q() || !p.has_f8_cache(); },
     FLASHATTN_REASON_DTYPE, "dtype",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "dtype = %s and dtype_kv = %s are not both F8E4M3",
                     dtype_name(p.dtype), dtype_name(p.dtype_kv));
     },
     true},
    {[](const Problem&, const Device& d) {
       return !is_hopper(d) || !cuda::sm90::has_code(d.index) || !cuda::sm90::has_tensor_maps();
     },
     FLASHATTN_REASON_ARCH, "dtype",
     [](const Problem& p, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype = %s is computed on Hopper GPUs (compute capability 9.0, this is "
                     "%d.%d) whose driver runs code for sm_90a; convert to F16 or BF16, or use "
                     "device = CPU",
                     dtype_name(p.dtype), d.properties.compute_capability / 10,
                     d.properties.compute_capability % 10);
     }},
    {[](const Problem& p, const Device& d) {
       return p.has_op(FLASHATTN_OP_BACKWARD) && p.multiprocessors == 0 &&
              is_refused_by_portable(cuda::sm90::Fp8BackwardRow::in_16_bits(p), d);
     },
     FLASHATTN_REASON_OP, "ops",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "ops has BACKWARD, but the 16-bit kernels of this build, which compute the "
                     "gradients of dtype = %s, do not take dim_qk = %d, dim_v = %d; use "
                     "ops = FORWARD, or device = CPU",
                     dtype_name(p.dtype), p.dim_qk, p.dim_v);
     }},
    {[](const Problem& p, const Device&) { return p.dim_qk > kMaxDim; },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_dim_above("dim_qk", p.dim_qk, kMaxDim, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_v > kMaxDim; },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_v",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_dim_above("dim_v", p.dim_v, kMaxDim, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_qk % kDimStep != 0; },
     FLASHATTN_REASON_HEAD_DIM_MULTIPLE, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_multiple("dim_qk", p.dim_qk, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_v % kDimStep != 0; },
     FLASHATTN_REASON_HEAD_DIM_MULTIPLE, "dim_v",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_multiple("dim_v", p.dim_v, text, capacity);
     }},
    {[](const Problem& p, const Device&) {
       return p.dim_qk <= kMaxDim && p.dim_v <= kMaxDim && !cuda::sm90::takes_fp8(p);
     },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "dtype",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype = %s with dim_qk = %d, dim_v = %d, softcap = %g, bias = %u, mask = %u, "
                     "dropout = %g, scale = %g, descale_block = %d has no GPU kernel in this "
                     "build; add rows to src/cuda/kernels/sm90/table.txt, use F16 or BF16, or "
                     "device = CPU",
                     dtype_name(p.dtype), p.dim_qk, p.dim_v, static_cast<double>(p.softcap), p.bias,
                     p.mask, static_cast<double>(p.dropout), static_cast<double>(p.scale),
                     p.descale_block);
     }},
    {[](const Problem& p, const Device&) { return cuda::sm90::has_fine_blocks(p); },
     FLASHATTN_REASON_VALUE, "block_q",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "block_q = %d, block_kv = %d: with dtype = %s each must be at least %d and "
                     "block_kv a multiple of 8; use larger blocks",
                     p.block_q, p.block_kv, dtype_name(p.dtype), kMinBlock);
     }},
    {[](const Problem& p, const Device&) { return p.has_mask(FLASHATTN_MASK_TREE); },
     FLASHATTN_REASON_MASK_COMBINATION, "mask",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "mask has TREE, with tree = %d, which the GPU kernels for dtype = %s do not "
           "compute; give the tree as a boolean bias (bias bit DENSE, dtype_bias U8), use "
           "F16 or BF16, or device = CPU",
           p.tree, dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return p.has_mask(FLASHATTN_MASK_PAGES); },
     FLASHATTN_REASON_MASK_COMBINATION, "mask",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "mask has PAGES, which the GPU kernels for dtype = %s do not compute; leave "
                     "hidden pages out of page_table, use F16 or BF16, or device = CPU",
                     dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return p.splits > 1; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "splits",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "splits = %d, but kernels for dtype = %s do not split keys; use 0 or 1",
                     p.splits, dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return p.multiprocessors != 0; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "multiprocessors",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "multiprocessors = %d, but the kernels of this version use all "
                     "multiprocessors; leave it at 0",
                     p.multiprocessors);
     }},
    {[](const Problem& p, const Device&) { return cuda::sm90::has_odd_pages(p); },
     FLASHATTN_REASON_VALUE, "page_size",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "page_size = %d is no multiple of %d, as dtype = %s wants it; use larger pages",
           p.page_size, kPageStep, dtype_name(p.dtype));
     }},
};

std::unique_ptr<Launcher> make_launcher(const Problem& problem, const Device& device,
                                        const std::string&) {
  // No other backend is preferred for E4M3: there is nothing to say of those before.
  return std::unique_ptr<Launcher>(new cuda::CudaLauncher(problem, device, "sm90_fp8", ""));
}

}  // namespace

const Backend& cuda_sm90_fp8_backend() {
  static const Backend backend = {"sm90_fp8", FLASHATTN_DEVICE_CUDA, kPredicates,
                                  sizeof kPredicates / sizeof *kPredicates, make_launcher};
  return backend;
}

}  // namespace flashattn
