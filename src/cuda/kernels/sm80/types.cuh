// The types and sizes that table.txt names.
#pragma once

#include "cuda/ptx/fp8.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/device/score_mod.cuh"
#include "cuda/kernels/sm80/table.h"

namespace flashattn::cuda::sm80 {

using bf16 = __nv_bfloat16;
using f16 = __half;
using f32 = float;
using e4m3 = ptx::E4m3;  // K and V; Q and O have 16 bits
constexpr Size deep = Size::kDeepPipeline, shallow = Size::kShallowPipeline;
constexpr Size rows32 = Size::kDecode32, rows64 = Size::kDecode64;
constexpr Size small = Size::kSmall, medium = Size::kMedium;  // for a cache of E4M3, see Size

using plain = ScoreModChain<>;
using dense_bias = ScoreModChain<DenseBias>;
using runtime = RuntimeScoreMod;
// Members are on as the problem says. Decode kernels have no block masks and no dropout.
using softcap_biases = RuntimeChain<Softcap, Alibi, DenseBias>;

template <class T>
constexpr int32_t kDtype = FLASHATTN_DTYPE_F16;
template <>
constexpr int32_t kDtype<bf16> = FLASHATTN_DTYPE_BF16;
template <>
constexpr int32_t kDtype<f32> = FLASHATTN_DTYPE_F32;
template <>
constexpr int32_t kDtype<e4m3> = FLASHATTN_DTYPE_F8E4M3;

}  // namespace flashattn::cuda::sm80
