// In place of src/cuda/ptx/fp8.cuh.
#pragma once

#include <cstdint>

#include "emulator.h"

namespace flashattn::cuda::ptx {

struct E4m3 {
  uint8_t bits;
};
constexpr float kMaxE4m3 = 448.0f;

inline uint32_t pack_e4m3(float low, float high) {
  return emulator::float_to_e4m3(low) | static_cast<uint32_t>(emulator::float_to_e4m3(high)) << 8;
}

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  return pack_e4m3(a, b) | pack_e4m3(c, d) << 16;
}
inline uint32_t pack_e4m3_here(float a, float b, float c, float d) { return pack_e4m3(a, b, c, d); }

inline const bool kUnpacksE4m3 = emulator::compute_capability() >= 89;

inline uint32_t unpack_e4m3(uint32_t pair) {
  const auto half = [](uint32_t bits) {
    return __half_raw(__float2half_rn(emulator::e4m3_to_float(static_cast<uint8_t>(bits)))).x;
  };
  return half(pair) | static_cast<uint32_t>(half(pair >> 8)) << 16;
}

}  // namespace flashattn::cuda::ptx
