// A validated descriptor, as every backend receives it.
#pragma once

#include <cmath>
#include <cstdint>

#include "flashattn.h"
#include "core/call.h"
#include "core/mask_geometry.h"

namespace flashattn {

// Bits of a mask by blocks that the library makes itself, from lists or lengths of blocks.
constexpr uint32_t kMaskOfBlocks = FLASHATTN_MASK_BLOCK_LISTS | FLASHATTN_MASK_BLOCK_LENS;

// A descriptor that passed validation, with every default resolved. ops, dtype_kv, dtype_o,
// heads_kv, dim_v and scale are never 0, nor is dtype_bias with a dense bias or dtype_grad with
// BACKWARD. Fields and bits of features that are off are 0.
struct Problem : flashattn_desc {
  FLASHATTN_HD bool has_op(uint32_t op) const { return (ops & op) != 0; }
  bool has_layout(uint32_t bit) const { return (layout & bit) != 0; }
  bool has_mask(uint32_t bit) const { return (mask & bit) != 0; }
  bool has_bias(uint32_t bit) const { return (bias & bit) != 0; }
  bool has_feature(uint32_t bit) const { return (features & bit) != 0; }

  // Whether elements have 8 bits, and so descales: those of q, of k and v, of any.
  bool has_8bit_q() const { return dtype == FLASHATTN_DTYPE_F8E4M3; }
  bool has_f8_cache() const { return dtype_kv == FLASHATTN_DTYPE_F8E4M3; }
  bool has_8bit_cache() const { return has_f8_cache() || dtype_kv == FLASHATTN_DTYPE_I8; }
  bool has_8bit() const { return has_8bit_q() || has_8bit_cache(); }

  // Whether a key is its row of v and then its row of k, which has only the further elements
  // (LATENT_KV).
  FLASHATTN_HD bool is_latent() const { return (layout & FLASHATTN_LAYOUT_LATENT_KV) != 0; }
  // Elements of a row of k.
  FLASHATTN_HD int32_t columns_k() const { return is_latent() ? dim_qk - dim_v : dim_qk; }
  FLASHATTN_HD int32_t dtype_k() const { return is_latent() ? dtype : dtype_kv; }
  // Descales of a row of v, with LATENT_KV.
  FLASHATTN_HD int32_t latent_descales() const { return (dim_v - 1) / descale_dim + 1; }

  // Query heads that share a KV head.
  FLASHATTN_HD int32_t q_heads_per_kv_head() const { return heads_q / heads_kv; }

  FLASHATTN_HD MaskRule mask_rule() const { return {mask, window_left, window_right, chunk, tree}; }

  // Dropout keeps an element of P if its 16-bit random number is at least this.
  uint32_t dropout_threshold() const {
    return static_cast<uint32_t>(std::lround(static_cast<double>(dropout) * 65536.0));
  }
};

// A device as backends see it. The strings live as long as the process.
struct Device {
  int32_t kind;  // enum flashattn_device
  int32_t index;
  flashattn_device_properties properties;
};

FLASHATTN_HD constexpr int32_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F32: return 4;
    case FLASHATTN_DTYPE_F16:
    case FLASHATTN_DTYPE_BF16: return 2;
    default: return 1;
  }
}

// A short name for names of kernels: "f32", "f16", "bf16", "f8", "i8".
inline const char* dtype_label(int32_t dtype) {
  switch (dtype) {
    case FLASHATTN_DTYPE_F32: return "f32";
    case FLASHATTN_DTYPE_BF16: return "bf16";
    case FLASHATTN_DTYPE_F8E4M3: return "f8";
    case FLASHATTN_DTYPE_I8: return "i8";
    default: return "f16";
  }
}

}  // namespace flashattn
