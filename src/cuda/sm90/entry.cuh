// The words of table.txt.
#pragma once

#include <type_traits>

#include "cuda/sm90/table.h"

namespace flashattn::cuda::sm90 {

using bf16 = __nv_bfloat16;
using f16 = __half;
constexpr Scores scaled = Scores::kScaled, capped = Scores::kCapped, sloped = Scores::kSloped,
                 shaped = Scores::kShaped, dropped = Scores::kDropped, any = Scores::kAny;

template <class T>
constexpr int32_t kDtype =
    std::is_same<T, bf16>::value ? FLASHATTN_DTYPE_BF16 : FLASHATTN_DTYPE_F16;

}  // namespace flashattn::cuda::sm90
