#include "cpu/backend.h"

#include <cstdio>

#include "core/validate_desc.h"
#include "cpu/launcher.h"

namespace flashattn {
namespace {

using cpu::kMaxDim;

const Predicate kPredicates[] = {
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
};

std::unique_ptr<Launcher> make_launcher(const Problem& problem, const Device&, const std::string&) {
  return std::unique_ptr<Launcher>(new cpu::CpuLauncher(problem));
}

}  // namespace

const Backend& cpu_backend() {
  static const Backend backend = {"cpu", FLASHATTN_DEVICE_CPU, kPredicates,
                                  sizeof kPredicates / sizeof *kPredicates, make_launcher};
  return backend;
}

}  // namespace flashattn
