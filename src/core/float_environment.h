// The floating-point environment that this library computes in: round to nearest, subnormals live,
// nothing trapped. The caller's, flags included, comes back when the object ends. Each thread has
// its own.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace flashattn {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  // The control word of the vector unit alone: nothing here uses the x87, and saving that takes a
  // hundred times as long.
  FloatEnvironment() : callers_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(callers_); }
#else
  FloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&callers_); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  const unsigned callers_;
#else
  std::fenv_t callers_;
#endif
};

}  // namespace flashattn
