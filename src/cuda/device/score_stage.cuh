// Every member of a score modification declares the following.
//
// static constexpr ScoreStage kStage: see below.
// static constexpr bool kBoundsGrowth: the scores of a row's first tiles tell how large its other
//   scores can be, so that the softmax may use a fixed base.
// static constexpr bool kReadsMemory: it reads an array beside Q, K and V.
// static bool is_on(const Problem&): whether the problem asks for it. kMask and kWeight need none:
//   kernels decide about those.
// static float factor(const Problem&): kProduct only. The factor from its results to scores.
// static float derivative_at(float): kProduct only. The member's derivative where its result is
//   this value.
//
// For the position of a fragment a kernel makes an object from a member, perhaps of another type.
// Its functions work on the lane's elements of the fragment:
//
// float forward(Layout, float (&s)[n], float factor): kProduct, kBias. Applies the member in the
//   forward pass. factor: still to be applied to s; returns the factor that remains.
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
  kProduct,  // changes Q K^T, whatever its query and key
  kBias,     // adds to the score of a query and key
  kMask,     // hides scores
  kWeight,   // elements of P
};

}  // namespace flashattn::cuda
