// Polynomials of a softcap for the Hopper kernels.
#include "cuda/host/softcap_fit.h"

#include <algorithm>
#include <cmath>

#include "core/score_mod.h"

namespace flashattn::cuda::sm90 {

namespace {

// Finds the polynomial in u = x^2 through f(x) at the Chebyshev nodes of 0 <= u <= end^2, times
// `factor`; x = inner * (q k). Returns whether all terms are finite.
template <int kTerms>
bool fit(double (*f)(double), double end, double inner, double factor, float (&terms)[kTerms]) {
  double at[kTerms], slope[kTerms];  // nodes; divided differences
  for (int n = 0; n < kTerms; ++n) {
    at[n] = end * end * (1 + std::cos((2 * n + 1) * std::acos(-1.0) / (2 * kTerms))) / 2;
    slope[n] = f(std::sqrt(at[n]));
  }
  for (int n = 1; n < kTerms; ++n) {
    for (int m = kTerms - 1; m >= n; --m)
      slope[m] = (slope[m] - slope[m - 1]) / (at[m] - at[m - n]);
  }
  double sum[kTerms] = {};  // Horner's scheme over u - at[n]
  for (int n = kTerms - 1; n >= 0; --n) {
    for (int m = kTerms - 1; m > 0; --m) sum[m] = sum[m - 1] - at[n] * sum[m];
    sum[0] = slope[n] - at[n] * sum[0];
  }
  bool finite = true;
  for (int n = 0; n < kTerms; ++n, factor *= inner * inner) {
    terms[n] = static_cast<float>(sum[n] * factor);
    finite &= std::isfinite(terms[n]);
  }
  return finite;
}

double relative_tanh(double x) { return std::tanh(x) / x; }

// |q k| where tanh's argument is x. Its square must not overflow.
float product(double x, double inner) {
  return static_cast<float>(std::min(x / std::abs(inner), 1e18));
}

}  // namespace

SoftcapPolynomials softcap_of(const Problem& p) {
  if (p.softcap == 0) return {};
  // tanh(x) for |x| < 1/4: x (1 + a x^2 + b x^4), minimax, relative error 6e-7.
  constexpr double kTerms[] = {1.0, -0.33324572, 0.12876415};
  const double inner = double{p.scale} / p.softcap, outer = p.scale * double{kLog2E};
  SoftcapPolynomials cap{};
  cap.input_scale = static_cast<float>(inner);
  double power = outer;
  bool finite = true;
  for (int n = 0; n < 3; ++n, power *= inner * inner) {
    cap.poly5[n] = static_cast<float>(power * kTerms[n]);
    finite &= std::isfinite(cap.poly5[n]);
  }
  if (!finite) return cap;
  cap.poly5_limit = product(0.25, inner);
  // Up to |x| = end, x (1 - end^4 / 24) + x^3 (end^2 / 6 - 1/3) is the best cubic for tanh(x), with
  // an error of end^5 / 120. For a score that is at most kError, below the rounding of sums.
  constexpr double kError = 0x1p-18;  // in log2 units
  const double end =
      std::min(std::pow(120 * kError / (p.softcap * double{kLog2E}), 0.2), std::sqrt(0.05));
  cap.poly3_limit = product(end, inner);
  cap.poly3[0] = static_cast<float>(outer * (1 - std::pow(end, 4) / 24));
  cap.poly3[1] = static_cast<float>(outer * inner * inner * (end * end / 6 - 1.0 / 3));
  return cap;
}

SoftcapPolynomials softcap_of_fp8(const Problem& p) {
  SoftcapPolynomials cap = softcap_of(p);
  if (p.softcap == 0) return cap;
  // Up to |x| = end the fit of tanh(x) is within end^5 / 60.
  constexpr double kError = 0x1p-9;  // in log2 units
  const double end = std::min(std::pow(60 * kError / (p.softcap * double{kLog2E}), 0.2), 0.5);
  const double inner = double{p.scale} / p.softcap, outer = p.scale * double{kLog2E};
  cap.poly3_limit = 0;
  if (fit(relative_tanh, end, inner, outer, cap.poly3)) cap.poly3_limit = product(end, inner);
  return cap;
}

SoftcapWithDerivative softcap_with_derivative(const Problem& p) {
  if (p.softcap == 0 || p.bias != 0) return {};
  const double inner = double{p.scale} / p.softcap, outer = p.scale * double{kLog2E};
  const auto derivative = [](double x) { return 1 - std::pow(std::tanh(x), 2); };
  // Up to |x| = end the fits of tanh(x) are within end^5 / 60 and end^7 / 600. Those of the
  // derivative are within 2^-12 where end is 0.22 and 0.5.
  constexpr double kError = 0x1p-13;
  const double relative = kError / (p.softcap * double{kLog2E});
  const double end3 = std::min(std::pow(60 * relative, 1 / 5.0), 0.22),
               end5 = std::min(std::pow(600 * relative, 1 / 7.0), 0.5);
  SoftcapWithDerivative cap{};
  cap.input_scale = static_cast<float>(inner);
  if (fit(relative_tanh, end3, inner, outer, cap.poly3) &
      fit(derivative, end3, inner, 1, cap.derivative3))
    cap.poly3_limit = product(end3, inner);
  if (fit(relative_tanh, end5, inner, outer, cap.poly5) &
      fit(derivative, end5, inner, 1, cap.derivative5))
    cap.poly5_limit = product(end5, inner);
  return cap;
}

}  // namespace flashattn::cuda::sm90
