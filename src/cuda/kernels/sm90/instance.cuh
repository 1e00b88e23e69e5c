// The names that rows of table.txt use.
#pragma once

#include <type_traits>

#include "cuda/device/score_mod.cuh"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;
using f16 = __half;
using plain = ScoreModChain<>;
using softcap = ScoreModChain<Softcap>;
using alibi = ScoreModChain<Alibi>;
using softcap_alibi = RuntimeChain<Softcap, Alibi>;
using dropout = ScoreModChain<Dropout>;
using block_mask = ScoreModChain<BlockMask>;
using dense_bias = ScoreModChain<DenseBias>;
using block_descales = ScoreModChain<BlockDescales>;
using runtime = RuntimeScoreMod;

// The kind by which the host knows a chain.
template <class ScoreMod>
constexpr ScoreModKind kKind = ScoreModKind::kRuntime;
template <>
constexpr ScoreModKind kKind<plain> = ScoreModKind::kPlain;
template <>
constexpr ScoreModKind kKind<softcap> = ScoreModKind::kSoftcap;
template <>
constexpr ScoreModKind kKind<alibi> = ScoreModKind::kAlibi;
template <>
constexpr ScoreModKind kKind<softcap_alibi> = ScoreModKind::kSoftcapAlibi;
template <>
constexpr ScoreModKind kKind<dropout> = ScoreModKind::kDropout;
template <>
constexpr ScoreModKind kKind<block_mask> = ScoreModKind::kBlockMask;
template <>
constexpr ScoreModKind kKind<dense_bias> = ScoreModKind::kDenseBias;
template <>
constexpr ScoreModKind kKind<block_descales> = ScoreModKind::kBlockDescales;

template <class T>
constexpr int32_t kDtype =
    std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16;

}  // namespace flashattn::cuda::sm90
