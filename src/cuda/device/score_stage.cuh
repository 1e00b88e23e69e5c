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
//
// What a kernel makes of a member for the place of a fragment, which may be another type, has
// functions of the lane's elements of the fragment:
//
// float forward(Layout, float (&s)[n], float factor): kProduct, kBias. Applies the member in the
//   forward pass. factor: s is still to be multiplied with it; returns what is left of it.
// void add(Layout, float (&s)[n]): kBias. Adds to scores to which the factor has been applied, in
//   the backward pass.
// void forward_with_derivative(float (&s)[n], float (&derivative)[n]): kProduct, backward pass.
//   Also multiplies the derivative of each score by the member's.
// void forward(SRowLayout, float (&s)[n]): kMask. Sets what is hidden of one row to -infinity.
//
// Members of kWeight are called by the kernels by name. So are the loads of a member that reads
// memory where registers decide when: kernels/sm90/bwd_prefetch.cuh, dense_bias_panel.cuh.
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
