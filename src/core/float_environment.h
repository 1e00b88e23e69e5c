// Sets the floating-point environment of this library for the thread: round to nearest, subnormals
// kept, nothing trapped. The destructor restores the caller's environment, flags included.
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
  // Only the vector unit's control word: nothing here uses the x87, whose state takes a hundred
  // times as long to save.
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
