// Predicates of the portable backend: what no GPU kernel computes.
#include "cuda/host/backend.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "core/validate_desc.h"
#include "cuda/host/launcher.h"
#include "cuda/host/sm80_fwd.h"

namespace flashattn {
namespace {

bool is_known(const Device& d) { return d.properties.compute_capability >= 80; }

bool is_computed(int32_t dtype) {
  return dtype == FLASHATTN_DTYPE_F32 || dtype == FLASHATTN_DTYPE_F16 ||
         dtype == FLASHATTN_DTYPE_BF16;
}

// The largest heads that the table has.
constexpr int32_t kMaxDimQk = 576, kMaxDimV = 512, kMaxDimCache = 256;
int32_t max_dim_qk(const Problem& p) {
  if (p.has_f8_cache()) return kMaxDimCache;
  if (!p.has_op(FLASHATTN_OP_BACKWARD)) return kMaxDimQk;
  return p.dtype == FLASHATTN_DTYPE_F32 ? 256 : 512;
}
int32_t max_dim_v(const Problem& p) { return std::min(max_dim_qk(p), kMaxDimV); }

// Rows of K and V are copied 16 bytes at once.
int32_t dim_step(const Problem& p) { return p.has_f8_cache() ? 16 : 8; }

// Names the feature that the kernels for a cache of E4M3 lack. NULL: they lack none.
const char* missing_beside_cache(const Problem& p) {
  if (!p.has_f8_cache()) return nullptr;
  if (p.has_op(FLASHATTN_OP_BACKWARD)) return "ops has BACKWARD";
  if (p.has_mask(FLASHATTN_MASK_BLOCKS)) return "mask has BLOCKS";
  if (p.dropout_threshold() != 0) return "dropout is not 0";
  if (p.dtype_o == FLASHATTN_DTYPE_F8E4M3) return "dtype_o is FLASHATTN_DTYPE_F8E4M3";
  return nullptr;
}

// Dtypes and dims for which every build has kernels, unless rows of the table were removed.
bool is_regular(const Problem& p) {
  return is_computed(p.dtype) && !(p.has_f8_cache() && p.dtype == FLASHATTN_DTYPE_F32) &&
         missing_beside_cache(p) == nullptr && p.dim_qk <= max_dim_qk(p) && p.dim_v <= max_dim_v(p);
}

int32_t shared_bytes(const Problem& p, const Device& d) {
  return cuda::sm80::shared_bytes(p, d.properties.shared_memory);
}

// forward: the limit of ops = FORWARD.
void explain_dim(const char* field, int32_t value, int32_t limit, int32_t forward, const Problem& p,
                 char* text, size_t capacity) {
  if (p.has_f8_cache()) {
    std::snprintf(text, capacity,
                  "%s = %d is above %d, the limit beside dtype_kv = F8E4M3 on this device; use "
                  "heads of at most %d elements, or a cache of dtype = %s",
                  field, value, limit, limit, dtype_name(p.dtype));
    return;
  }
  if (value > forward) return explain_dim_above(field, value, limit, text, capacity);
  std::snprintf(text, capacity,
                "%s = %d is above %d, the limit of the backward pass in %s on this device; use "
                "heads of at most %d elements, or ops = FORWARD",
                field, value, limit, dtype_name(p.dtype), limit);
}

void explain_multiple(const char* field, int32_t value, const Problem& p, char* text,
                      size_t capacity) {
  const int32_t step = dim_step(p);
  std::snprintf(text, capacity, "%s = %d is no multiple of %d%s; pad the head to %d", field, value,
                step, p.has_f8_cache() ? ", as dtype_kv = F8E4M3 wants it" : "",
                (value + step - 1) / step * step);
}

const Predicate kPredicates[] = {
    {[](const Problem&, const Device& d) { return !is_known(d); }, FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "compute capability %d.%d is below 8.0, the least of every GPU backend; use "
                     "an Ampere or later GPU, or device = CPU",
                     d.properties.compute_capability / 10, d.properties.compute_capability % 10);
     }},
    {[](const Problem&, const Device& d) { return is_known(d) && !cuda::sm80::has_code(d.index); },
     FLASHATTN_REASON_ARCH, "device",
     [](const Problem&, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "compute capability %d.%d, with this driver, runs none of this build's code, "
                     "for %s; build for it with the option gpu_archs, install a later driver, or "
                     "use device = CPU",
                     d.properties.compute_capability / 10, d.properties.compute_capability % 10,
                     cuda_architectures());
     }},
    {[](const Problem& p, const Device&) { return p.is_latent(); }, FLASHATTN_REASON_LAYOUT,
     "layout",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "layout has LATENT_KV, with dtype = %s, dtype_kv = %s, dim_qk = %d, dim_v = %d, "
           "descale_dim = %d: of GPUs only Hopper computes it, for F16 or BF16, F8E4M3, "
           "576, 512, 128, a plain scale and masks by position; use those, or device = "
           "CPU",
           dtype_name(p.dtype), dtype_name(p.dtype_kv), p.dim_qk, p.dim_v, p.descale_dim);
     }},
    {[](const Problem& p, const Device&) { return p.multiprocessors != 0; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "multiprocessors",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "multiprocessors = %d, but the kernels of this version use all multiprocessors; leave "
           "it at 0",
           p.multiprocessors);
     }},
    {[](const Problem& p, const Device&) { return p.dtype_kv == FLASHATTN_DTYPE_I8; },
     FLASHATTN_REASON_DTYPE, "dtype_kv",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype_kv = %s is computed on the CPU only; use FLASHATTN_DTYPE_F8E4M3 for "
                     "the cache, or device = CPU",
                     dtype_name(p.dtype_kv));
     }},
#if FLASHATTN_CUDA_SM90
    {[](const Problem& p, const Device&) { return p.dtype == FLASHATTN_DTYPE_F8E4M3; },
     FLASHATTN_REASON_DTYPE, "dtype",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity, "dtype = %s is for the Hopper kernels", dtype_name(p.dtype));
     },
     true},
#endif
    {[](const Problem& p, const Device&) { return !is_computed(p.dtype); }, FLASHATTN_REASON_DTYPE,
     "dtype",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype = %s is not computed on GPUs; convert to F32, F16 or BF16",
                     dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) {
       return p.has_f8_cache() && p.dtype == FLASHATTN_DTYPE_F32;
     },
     FLASHATTN_REASON_DTYPE_MIX, "dtype_kv",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype_kv = %s beside dtype = %s is computed on the CPU only; use F16 or BF16 "
                     "for q, or device = CPU",
                     dtype_name(p.dtype_kv), dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return missing_beside_cache(p) != nullptr; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "dtype_kv",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(
           text, capacity,
           "%s, which the GPU kernels for dtype_kv = %s do not compute; convert the cache "
           "to dtype = %s, or use device = CPU",
           missing_beside_cache(p), dtype_name(p.dtype_kv), dtype_name(p.dtype));
     }},
    {[](const Problem& p, const Device&) { return p.dim_qk > max_dim_qk(p); },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_dim("dim_qk", p.dim_qk, max_dim_qk(p), kMaxDimQk, p, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_v > max_dim_v(p); },
     FLASHATTN_REASON_HEAD_DIM_MAX, "dim_v",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_dim("dim_v", p.dim_v, max_dim_v(p), kMaxDimV, p, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_qk % dim_step(p) != 0; },
     FLASHATTN_REASON_HEAD_DIM_MULTIPLE, "dim_qk",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_multiple("dim_qk", p.dim_qk, p, text, capacity);
     }},
    {[](const Problem& p, const Device&) { return p.dim_v % dim_step(p) != 0; },
     FLASHATTN_REASON_HEAD_DIM_MULTIPLE, "dim_v",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       explain_multiple("dim_v", p.dim_v, p, text, capacity);
     }},
    {[](const Problem& p, const Device& d) { return is_regular(p) && shared_bytes(p, d) == 0; },
     FLASHATTN_REASON_NOT_IN_THIS_BUILD, "dtype",
     [](const Problem& p, const Device&, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dtype = %s, dtype_kv = %s, dim_qk = %d, dim_v = %d with ops = %u have no "
                     "kernel in this build; add rows to src/cuda/kernels/sm80/table.txt",
                     dtype_name(p.dtype), dtype_name(p.dtype_kv), p.dim_qk, p.dim_v, p.ops);
     }},
    {[](const Problem& p, const Device& d) {
       return is_regular(p) && shared_bytes(p, d) > d.properties.shared_memory;
     },
     FLASHATTN_REASON_SHARED_MEMORY, "dim_qk",
     [](const Problem& p, const Device& d, char* text, size_t capacity) {
       std::snprintf(text, capacity,
                     "dim_qk = %d, dim_v = %d with ops = %u needs %d bytes of shared memory a "
                     "CTA, above %d, the limit of this device; use smaller heads%s",
                     p.dim_qk, p.dim_v, p.ops, shared_bytes(p, d), d.properties.shared_memory,
                     p.has_op(FLASHATTN_OP_BACKWARD) ? ", or ops = FORWARD" : "");
     }},
};

std::unique_ptr<Launcher> make_launcher(const Problem& problem, const Device& device,
                                        const std::string& passed_over) {
  return std::unique_ptr<Launcher>(new cuda::CudaLauncher(problem, device, "sm80", passed_over));
}

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend backend = {"sm80", FLASHATTN_DEVICE_CUDA, kPredicates,
                                  sizeof kPredicates / sizeof *kPredicates, make_launcher};
  return backend;
}

bool is_refused_by_portable(const Problem& problem, const Device& device) {
  return std::any_of(std::begin(kPredicates), std::end(kPredicates),
                     [&](const Predicate& p) { return p.refuses(problem, device); });
}

}  // namespace flashattn
