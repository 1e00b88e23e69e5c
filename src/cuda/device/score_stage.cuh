// Every member of a score modification declares the following.
//
// static constexpr ScoreStage kStage: see below.
// static constexpr bool kBoundsGrowth: the scores of a row's first tiles tell how large its other
//   scores can be, so that the softmax may use a fixed base.
// static constexpr bool kReadsMemory: it reads an array beside Q, K and V.
// static bool is_on(const Problem&): whether the problem asks for it. Not of a member that is
//   decided elsewhere: kMask, kWeight.
// static float derivative_at(float): of a member of kProduct, its derivative where it leaves this
//   value.
#pragma once

namespace flashattn::cuda {

// On what a member works, in this order.
enum class ScoreStage {
  kProduct,  // Q K^T, whatever query and key it is of
  kBias,     // adds to the score of a query and key
  kMask,     // hides scores
  kWeight,   // elements of P
};

}  // namespace flashattn::cuda
