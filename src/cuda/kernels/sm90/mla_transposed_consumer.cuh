// A consumer warpgroup of the Hopper kernel for few rows and LATENT_KV: Q, masks, base and sum of
// each row, scores to P. Scores are held transposed: a lane has keys key() and key() + 8 of a tile,
// and of every 8 rows of Q those of row() and row() + 1.
#pragma once

#include <cfloat>

#include "cuda/device/tree_mask.cuh"
#include "cuda/kernels/sm90/mla_transposed_config.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaTransposedConsumer {
 public:
  using T = typename Config::T;
  using SharedStorage = typename Config::SharedStorage;
  static constexpr int kTileQ = Config::kTileQ, kTileKv = Config::kTileKv;
  static constexpr int kScores = kTileQ / 2;    // of a lane
  static constexpr int kLaneRows = kTileQ / 4;  // rows of Q of a lane
  static constexpr int kPartsOfO = Config::kDimV / Config::kConsumers / 64;
  // A maximum may exceed the base by this much, in log2, before the base rises; 0 in a redone tile.
  static constexpr float kBaseSlack = 8.0f;
  static constexpr float kMaxRowSum = 0x1p100f;

  // IDs of named barriers; 0 is __syncthreads().
  static constexpr int kPBarrier = 1;          // + warpgroup: its P is in shared memory
  static constexpr int kExchangeBarrier = 3;   // both warpgroups
  static constexpr int kWarpgroupBarrier = 4;  // + warpgroup: its four warps
  static constexpr int kFreeBarrier = 6;       // + warpgroup: the other one has read its P

  __device__ __forceinline__ MlaTransposedConsumer(const MlaParams& params, uint32_t shared,
                                                   SharedStorage& storage, int32_t warpgroup)
      : params_(params), storage_(storage), shared_(shared), warpgroup_(warpgroup) {}

  // Volatile: fields are read from shared memory at each use, which saves registers.
  __device__ __forceinline__ const volatile MlaWorkTile& tile() const { return storage_.work_tile; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }
  __device__ __forceinline__ int32_t warp() const { return no_hoist(threadIdx.x) % 128 / 32; }
  // The index among the threads of both warpgroups.
  __device__ __forceinline__ int32_t thread() const { return no_hoist(threadIdx.x) - 128; }
  __device__ __forceinline__ int32_t key() const { return warp() * 16 + lane() / 4; }
  __device__ __forceinline__ int32_t row() const { return lane() % 4 * 2; }
  __device__ __forceinline__ void warpgroup_sync() const {
    ptx::named_sync(kWarpgroupBarrier + warpgroup_, 128);
  }
  __device__ __forceinline__ void exchange_sync() const { ptx::named_sync(kExchangeBarrier, 256); }

  // Copies Q to shared memory, with both warpgroups, and finds the keys that each row sees. The
  // columns of V become fp16, times a power of two which makes the largest 2^14 or more; within
  // every 16 columns they are ordered as the lanes' bytes of a row of K are.
  __device__ __forceinline__ void load_q() {
    constexpr int kChunksV = Config::kDimV / 8, kSteps = kTileQ * kChunksV / 256;
    int4 chunks[kSteps];
    uint32_t most = 0;
#pragma unroll
    for (int x = 0; x < kSteps; ++x) {
      const int32_t r = thread() / kChunksV + x * (256 / kChunksV);
      chunks[x] = make_int4(0, 0, 0, 0);
      if (r < tile().rows) {
        chunks[x] = *reinterpret_cast<const int4*>(q_row(r) + thread() % kChunksV * 16);
      }
    }
#pragma unroll
    for (int x = 0; x < kSteps; ++x) {
      const int32_t words[] = {chunks[x].x, chunks[x].y, chunks[x].z, chunks[x].w};
#pragma unroll
      for (int n = 0; n < 4; ++n)
        most = ptx::max_with_abs<T>(most, static_cast<uint32_t>(words[n]));
    }
    copy_rotary();
    find_visible();
    const float2 pair = ptx::unpack<T>(most);
    const int32_t top =
        __reduce_max_sync(~0u, static_cast<int32_t>(__float_as_uint(fmaxf(pair.x, pair.y))));
    if (lane() == 0) storage_.partials[thread() / 32][0] = __int_as_float(top);
    exchange_sync();
    int32_t bits = 0;
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      bits = max(bits, __float_as_int(const_cast<const volatile float&>(storage_.partials[x][0])));
    }
    const int32_t exponent = min(max(bits >> 23, 15), 254);
    if (thread() == 0) storage_.q_unit = __int_as_float((exponent - 14) << 23);
    const float scale = __int_as_float((268 - exponent) << 23);
#pragma unroll
    for (int x = 0; x < kSteps; ++x) {
      const int32_t r = thread() / kChunksV + x * (256 / kChunksV), chunk = thread() % kChunksV;
      const int32_t words[] = {chunks[x].x, chunks[x].y, chunks[x].z, chunks[x].w};
      uint32_t halves[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 y = ptx::unpack<T>(static_cast<uint32_t>(words[n]));
        halves[n] = ptx::pack<__half>(y.x * scale, y.y * scale);
      }
      const uint32_t to = shared_ + chunk / 8 * Config::kPanelBytes + r * 128 +
                          ((chunk % 8 / 2 * 2 ^ (r & 7)) << 4) + chunk % 2 * 8;
      ptx::store_shared_8(to, halves[0], halves[2]);
      ptx::store_shared_8(to ^ 16, halves[1], halves[3]);
    }
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
    exchange_sync();
  }

  // Sets scores of tile n that are hidden from their rows to -inf. whole: only pages hide any. No
  // tile has keys of two splits: splits begin at multiples of a tile.
  __device__ __forceinline__ void mask(int32_t n, int32_t stage, bool whole) {
    if (params_.common.problem.mask & FLASHATTN_MASK_PAGES) mask_by_pages(stage);
    if (whole || (n >= tile().full_tiles.begin && n < tile().full_tiles.end)) return;
    const TreeMask tree{params_.common.tree, tile().b, {tile().len.q, tile().len.kv}};
    const bool has_tree = params_.common.problem.mask & FLASHATTN_MASK_TREE;
    const int32_t first = n * kTileKv + key();
    uint32_t hidden = 0;  // two bits for each row of this lane
#pragma unroll 1
    for (int32_t x = 0; x < kLaneRows; ++x) {
      const int32_t r = x / 2 * 8 + row() + x % 2;
      const volatile Interval& visible = storage_.visible_kv[r];
      const int32_t begin = visible.begin, end = visible.end;
      const int32_t query =
          has_tree ? mla_row(params_, tile().first_row, 0, min(r, tile().rows - 1)).query : 0;
#pragma unroll 1
      for (int32_t m = 0; m < 2; ++m) {
        const int32_t at = first + 8 * m;
        const bool shown = has_tree ? tree.shows(query, at) : at >= begin && at < end;
        hidden |= static_cast<uint32_t>(!shown) << (2 * x + m);
      }
    }
#pragma unroll
    for (int x = 0; x < 2 * kLaneRows; ++x) {
      if (hidden >> x & 1) s_[x / 4 * 4 + x % 2 * 2 + x / 2 % 2] = -INFINITY;
    }
  }

  // Turns products of q and k into rounded scores, in units of kWideUnit log2(e).
  __device__ __forceinline__ void scale_scores() {
    const float wide = params_.common.problem.scale * (kLog2E / kWideUnit);
#pragma unroll
    for (float& x : s_) x = __fmul_rn(x, wide);
  }

  // Raises each row's base to its maximum over the tiles of both warpgroups, if that exceeds the
  // base by more than the slack. Both warpgroups call it; own: this one has a tile. Returns whether
  // a base rose. Scores and bases are in units of kWideUnit log2(e), in which all are finite.
  __device__ __forceinline__ void update_base(bool own, bool redo) {
    const float slack = redo ? 0.0f : kBaseSlack / kWideUnit;
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = own ? fmaxf(s_[4 * j + e], s_[4 * j + 2 + e]) : -INFINITY;
#pragma unroll
        for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
        if (lane() < 4) storage_.partials[thread() / 32][8 * j + row() + e] = top;
      }
    }
    exchange_sync();
    const int32_t r = thread();
    if (r < kTileQ) {
      float top = -INFINITY;
#pragma unroll
      for (int x = 0; x < 8; ++x) top = fmaxf(top, partial(x, r));
      const float before = storage_.base[r];
      const bool keep = !(top > before + slack);
      const float base = keep ? before : top;
      storage_.base[r] = base;
      storage_.top[r] = base == -INFINITY ? 0.0f : base * kWideUnit;
      storage_.o_scale[r] = keep ? 1.0f : ptx::exp2((before - top) * kWideUnit);
    }
    exchange_sync();
    bool rescales = false;
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
      const float2 scale = of_rows(storage_.o_scale, j);
      row_sum_[2 * j] *= scale.x;
      row_sum_[2 * j + 1] *= scale.y;
      rescales |= scale.x != 1.0f || scale.y != 1.0f;
    }
    // The base rarely rises after the first tiles.
    if (__any_sync(~0u, rescales)) scale_o_by_row();
  }

  // Multiplies O by a factor for each row.
  __device__ __forceinline__ void scale_o_by_row() {
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
      const float2 scale = of_rows(storage_.o_scale, j);
#pragma unroll
      for (int i = 0; i < kPartsOfO; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) o_[i][4 * j + x] *= x % 2 ? scale.y : scale.x;
      }
    }
  }

  // P of scores that scale_scores() has rounded: the base is subtracted exactly.
  __device__ __forceinline__ void exp2_exact() {
    exp2_and_sum(storage_.base, [](float x, float base) {
      return __fsub_rn(x, base == -INFINITY ? 0.0f : base) * kWideUnit;
    });
  }

  // P of products of q and k.
  __device__ __forceinline__ void exp2_scaled() {
    const float c = params_.common.problem.scale * kLog2E;
    exp2_and_sum(storage_.top, [&](float x, float top) { return fmaf(x, c, -top); });
  }

  // Begins a pass over the keys.
  __device__ __forceinline__ void reset() {
    if (thread() < kTileQ) storage_.base[thread()] = -INFINITY;
#pragma unroll
    for (float& x : row_sum_) x = 0.0f;
#pragma unroll
    for (auto& part : o_) {
#pragma unroll
      for (float& x : part) x = 0.0f;
    }
    unit_ = 0;
    if (thread() == 0) storage_.units[0][1] = 0;
  }

  // Ends a pass: stores the row sums by warp, and whether O is finite.
  __device__ __forceinline__ void store_row_sums() const {
    float nonfinite = 0.0f;  // stays 0 while O is finite
#pragma unroll
    for (const auto& part : o_) {
#pragma unroll
      for (const float x : part) nonfinite = fmaf(x, 0.0f, nonfinite);
    }
    const bool bad = __any_sync(~0u, !(nonfinite == 0.0f));
    if (lane() == 0) storage_.nonfinite[thread() / 32] = bad;
#pragma unroll
    for (int x = 0; x < kLaneRows; ++x) {
      float sum = row_sum_[x];
#pragma unroll
      for (int y = 4; y < 32; y *= 2) sum += __shfl_xor_sync(~0u, sum, y);
      if (lane() < 4) storage_.partials[thread() / 32][x / 2 * 8 + row() + x % 2] = sum;
    }
    exchange_sync();
  }

  // The sum of row r, and whether it needs a redo: the sum or its base is out of range, or O is not
  // finite. P of a single key rounds to 1, and O is V of that key to the last digit.
  __device__ __forceinline__ float row_sum(int32_t r, bool& bad) const {
    float sum = 0.0f;
    int32_t nonfinite = 0;
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      sum += partial(x, r);
      nonfinite |= const_cast<const volatile int32_t&>(storage_.nonfinite[x]);
    }
    const volatile Interval& visible = storage_.visible_kv[r];
    const int32_t keys = visible.end - visible.begin;
    const float base = storage_.base[r];
    bad = !(sum <= kMaxRowSum) || nonfinite;
    bad |=
        base != -INFINITY && !(fabsf(base) <= (keys == 1 ? kLargeScore : kRedoScore) / kWideUnit);
    bad |= keys > 0 && !(sum >= FLT_MIN);
    bad |= base == -INFINITY && sum > 0.0f;  // no key before the base was fixed
    bad &= r < tile().rows;
    return keys == 1 && sum > 0.0f ? 1.0f : sum;
  }

  // The numbers of this lane's rows 8 j + row() and the next.
  static __device__ __forceinline__ float2 of_lane(const float* numbers, int32_t row) {
    return ptx::load_shared_pair(ptx::shared_address(numbers + row));
  }
  __device__ __forceinline__ float2 of_rows(const float* numbers, int j) const {
    return of_lane(numbers, 8 * j + row());
  }
  __device__ __forceinline__ float partial(int warp, int32_t r) const {
    return const_cast<const volatile float&>(storage_.partials[warp][r]);
  }

  __device__ __forceinline__ float q_unit() const {
    return const_cast<const volatile float&>(storage_.q_unit);
  }

  const MlaParams& params_;
  SharedStorage& storage_;
  const uint32_t shared_;
  const int32_t warpgroup_;
  // O is held in units of 2^(unit_ - 132), and P is multiplied accordingly, see prepare_v().
  int32_t unit_;
  float row_sum_[kLaneRows];     // over this lane's keys
  float s_[kScores];             // element 4 j + 2 m + e: key() + 8 m, row 8 j + row() + e
  float o_[kPartsOfO][kScores];  // likewise; columns of V instead of keys

 private:
  __device__ __forceinline__ const char* q_row(int32_t r) const {
    const MlaRow at = mla_row(params_, tile().first_row, tile().kv_head, r);
    return tensor_row(params_.common.args.inputs.q, 2, tile().b, at.head,
                      tile().offset_q + at.query);
  }

  __device__ __forceinline__ void copy_rotary() const {
#pragma unroll 1
    for (int32_t x = thread(); x < kTileQ * 8; x += 256) {
      const int32_t r = x / 8, chunk = x % 8;
      ptx::cp_async_16(shared_ + Config::kRotaryOffset + r * 128 + ((chunk ^ (r & 7)) << 4),
                       q_row(min(r, tile().rows - 1)) + Config::kDimV * 2 + chunk * 16,
                       r < tile().rows);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void find_visible() const {
    const cuda::ForwardParams& common = params_.common;
    const int32_t r = thread();
    if (r >= kTileQ) return;
    const Lengths len{tile().len.q, tile().len.kv};
    Interval keys{0, len.kv};
    if (common.max_splits > 1) keys = split_range(common.split, len, tile().split_idx);
    const int32_t query = mla_row(params_, tile().first_row, 0, min(r, tile().rows - 1)).query;
    storage_.visible_kv[r] = intersect(visible_keys(common.problem.mask_rule(), query, len), keys);
  }

  __device__ __forceinline__ void mask_by_pages(int32_t stage) {
    // Bit n says whether the page of the warp's key n is shown.
    const uint32_t shown = const_cast<const volatile uint16_t&>(storage_.shown_kv[stage][warp()]);
    const bool low = shown >> lane() / 4 & 1, high = shown >> lane() / 4 + 8 & 1;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (!(i / 2 % 2 ? high : low)) s_[i] = -INFINITY;
    }
  }

  // The sum of a tile comes first, so that a large row sum is rounded once per tile.
  template <class Exponent>
  __device__ __forceinline__ void exp2_and_sum(const float* bases, Exponent exponent) {
#pragma unroll
    for (int j = 0; j < kTileQ / 8; ++j) {
      const float2 base = of_rows(bases, j);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = 4 * j + x;
        s_[i] = ptx::exp2(exponent(s_[i], x % 2 ? base.y : base.x));
      }
      row_sum_[2 * j] += s_[4 * j] + s_[4 * j + 2];
      row_sum_[2 * j + 1] += s_[4 * j + 1] + s_[4 * j + 3];
    }
  }
};

}  // namespace flashattn::cuda::sm90
