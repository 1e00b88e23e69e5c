// The tile registers of AMX in software, for tests on processors without them: included before the
// kernels' source, it takes the place of the compiler's intrinsics. What a processor would refuse
// with an exception ends the program here.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace emulated_tiles {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64, "the operand of ldtilecfg");

struct Registers {
  Config config;
  uint32_t words[8][16][16];
};

// All zeros: no tile may be used.
inline thread_local Registers registers;

inline void require(bool held, const char* rule) {
  if (held) return;
  std::fprintf(stderr, "AMX: %s\n", rule);
  std::abort();
}

inline void require_configured(int tile) {
  require(registers.config.palette == 1, "a tile is used before ldtilecfg");
  require(registers.config.rows[tile] != 0, "a tile without rows is used");
}

inline void load_config(const void* from) {
  Config config;
  std::memcpy(&config, from, sizeof config);
  require(config.palette == 1 && config.start_row == 0, "palette 1 and row 0 are expected");
  for (int n = 0; n < 16; ++n) {
    const bool used = config.rows[n] != 0;
    require(used == (config.row_bytes[n] != 0), "rows and bytes of a tile are zero together");
    require(!used || n < 8, "palette 1 has 8 tiles");
    require(config.rows[n] <= 16 && config.row_bytes[n] <= 64, "a tile is at most 16 x 64 bytes");
    require(config.row_bytes[n] % 4 == 0, "products take whole units");
  }
  for (const uint8_t byte : config.reserved) require(byte == 0, "reserved bytes are zero");
  std::memset(&registers, 0, sizeof registers);
  registers.config = config;
}

inline void store_config(void* to) { std::memcpy(to, &registers.config, sizeof(Config)); }

inline void release() { std::memset(&registers, 0, sizeof registers); }

inline void zero(int tile) {
  require_configured(tile);
  std::memset(registers.words[tile], 0, sizeof registers.words[tile]);
}

inline void load(int tile, const void* base, int64_t stride) {
  zero(tile);
  for (int r = 0; r < registers.config.rows[tile]; ++r) {
    std::memcpy(registers.words[tile][r], static_cast<const char*>(base) + r * stride,
                registers.config.row_bytes[tile]);
  }
}

inline void store(int tile, void* base, int64_t stride) {
  require_configured(tile);
  for (int r = 0; r < registers.config.rows[tile]; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, registers.words[tile][r],
                registers.config.row_bytes[tile]);
  }
}

typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

// Subnormals count as zero, those that come in and those that come out.
inline Words flush(Words x) { return (x & 0x7f800000u) != 0 ? x : x & 0x80000000u; }

inline Floats multiply_add(Floats sum, Words a, Words b) {
  return (Floats)flush((Words)(sum + (Floats)flush(a) * (Floats)flush(b)));
}

// c += a b as Intel's manual has it: the even and the odd numbers of a row are summed apart.
inline void multiply(int c, int a, int b) {
  require_configured(a);
  require_configured(b);
  require_configured(c);
  const Config& config = registers.config;
  const int rows = config.rows[c], k = config.row_bytes[a] / 4;
  require(a != b && a != c && b != c, "the tiles of a product differ");
  require(
      config.rows[a] == rows && config.rows[b] == k && config.row_bytes[b] == config.row_bytes[c],
      "the tiles of a product do not fit");
  for (int m = 0; m < rows; ++m) {
    Floats even{}, odd{};
    for (int n = 0; n < k; ++n) {
      const Words left = registers.words[a][m][n] - Words{};
      Words right;
      std::memcpy(&right, registers.words[b][n], sizeof right);
      even = multiply_add(even, left << 16, right << 16);
      odd = multiply_add(odd, left & 0xffff0000u, right & 0xffff0000u);
    }
    Floats sum;
    std::memcpy(&sum, registers.words[c][m], sizeof sum);
    const Words result = flush((Words)((Floats)flush((Words)sum) + (even + odd)));
    std::memcpy(registers.words[c][m], &result, config.row_bytes[c]);
  }
}

}  // namespace emulated_tiles

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_tiles::load_config(config)
#define _tile_storeconfig(config) emulated_tiles::store_config(config)
#define _tile_release() emulated_tiles::release()
#define _tile_zero(tile) emulated_tiles::zero(tile)
#define _tile_loadd(tile, base, stride) emulated_tiles::load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emulated_tiles::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_tiles::store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_tiles::multiply(c, a, b)
