// Polynomials of a softcap for the Hopper kernels.
#pragma once

#include "core/problem.h"
#include "cuda/kernels/sm90/params.h"

namespace flashattn::cuda::sm90 {

// For the forward pass: scores within 2^-18, in units of log2(e), below the rounding of sums.
SoftcapPolynomials softcap_of(const Problem& problem);

// For E4M3: poly3 is within 2^-9, far below the rounding of P, and in a larger range.
SoftcapPolynomials softcap_of_fp8(const Problem& problem);

// For the backward pass, with the derivative: scores within 2^-13, below the rounding of P to fp16,
// and in a larger range. With a bias the limits are 0, so that no product uses a polynomial.
SoftcapWithDerivative softcap_with_derivative(const Problem& problem);

}  // namespace flashattn::cuda::sm90
