// The names that rows of table.txt use.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;
using f16 = __half;
constexpr ScoreModKind plain = ScoreModKind::kPlain, softcap = ScoreModKind::kSoftcap,
                       alibi = ScoreModKind::kAlibi, softcap_alibi = ScoreModKind::kSoftcapAlibi,
                       dropout = ScoreModKind::kDropout, runtime = ScoreModKind::kRuntime;

template <class T>
constexpr int32_t kDtype =
    std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16;

}  // namespace flashattn::cuda::sm90
