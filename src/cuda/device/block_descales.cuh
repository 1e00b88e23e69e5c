// Descales of E4M3 by blocks of tokens: factors of Q and K change scores, those of V weigh P.
#pragma once

#include "cuda/device/score_stage.cuh"

namespace flashattn::cuda {

// Kernels compiled for it take blocks of multiples of 64 tokens: see fwd_fp8_descales.cuh.
struct BlockDescales {
  static constexpr ScoreStage kStage = ScoreStage::kWeight;
  static constexpr bool kBoundsGrowth = true, kReadsMemory = true;
};

}  // namespace flashattn::cuda
