// Mainloop of a consumer warpgroup of the Hopper kernel for few rows and LATENT_KV. See
// mla_transposed.cuh.
#pragma once

#include "cuda/device/e4m3.cuh"
#include "cuda/kernels/sm90/mla_transposed_epilogue.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class MlaTransposedMainloop : MlaTransposedConsumer<Config> {
  using Base = MlaTransposedConsumer<Config>;
  using T = typename Config::T;
  using Base::params_, Base::storage_, Base::shared_, Base::warpgroup_;
  using Base::s_, Base::o_, Base::unit_, Base::kTileKv;
  using Base::tile, Base::lane, Base::warp, Base::key;
  static constexpr int kPanelBytes = Config::kPanelBytes, kRecordBytes = Config::kRecordBytes;
  static constexpr int kPartsOfO = Base::kPartsOfO, kColumns = Config::kDimV / Config::kConsumers;
  // Keys whose descale exceeds unit_'s by a larger factor, in log2, change unit_.
  static constexpr int32_t kUnitSlack = 6;
  static constexpr int32_t kUnitBias = 132;

  struct Stage {
    int32_t index, parity;
  };
  // Tiles n and n + 1, of which the last may not exist. buffer: which of two buffers has what the
  // warpgroups hand over beside P.
  struct Pair {
    int32_t n, end;
    Stage stage;  // of tile n
    int32_t buffer;

    __device__ __forceinline__ Stage stage_of(int32_t warpgroup) const {
      return warpgroup == 0 ? stage : next_stage(stage);
    }
  };
  using Operand = uint32_t[16];                                  // A of four WGMMAs, 64 x 64
  static constexpr int kBuffers = Config::kTileQ == 16 ? 4 : 2;  // of operands

 public:
  __device__ __forceinline__ MlaTransposedMainloop(const MlaParams& params, uint32_t shared,
                                                   typename Config::SharedStorage& storage,
                                                   int32_t warpgroup)
      : Base(params, shared, storage, warpgroup) {}

  __device__ __forceinline__ void run() {
    this->load_q();
#pragma unroll 1
    for (bool redo = false;;) {
      pass(redo);
      this->store_row_sums();
      if (redo) break;
      if (this->thread() < Config::kTileQ) {
        bool bad;
        this->row_sum(this->thread(), bad);
        if (bad) storage_.redo = 1;
      }
      __syncthreads();
      redo = storage_.is_redo();
      if (!redo) break;
    }
    MlaTransposedEpilogue<Config>(*this).store();
  }

 private:
  // Computes O and row sums over all tiles, in a redo with online softmax in every step. Otherwise
  // pairs of tiles that every row sees whole have a fixed base once every row has seen a key.
  __device__ __forceinline__ void pass(bool redo) {
    this->reset();
    this->exchange_sync();
    const Interval tiles{tile().tiles.begin, tile().tiles.end};
    const int32_t fixed_begin = max(tile().fixed_begin, tile().full_tiles.begin);
    const int32_t fixed_end = redo ? 0 : min(tile().full_tiles.end, tiles.end) - 1;
    const int32_t passed = redo ? tiles.end - tiles.begin : 0;
    Pair pair{tiles.begin, tiles.end, {passed % Config::kStages, passed / Config::kStages & 1}, 0};
#pragma unroll 1
    for (bool first = true; pair.n < tiles.end; first = false) {
      step(pair, pair.n >= fixed_begin && pair.n < fixed_end, redo, first);
      pair.n += 2;
      pair.stage = next_stage(next_stage(pair.stage));
      pair.buffer ^= 1;
    }
  }

  static __device__ __forceinline__ Stage next_stage(Stage stage) {
    static_assert((Config::kStages & (Config::kStages - 1)) == 0, "a power of two");
    const int32_t index = stage.index + 1;
    return {index % Config::kStages, stage.parity ^ index / Config::kStages};
  }

  // The pair's tiles: this warpgroup computes the scores of one, and its columns of P V of both.
  // fixed: the base is.
  __device__ __forceinline__ void step(const Pair& pair, bool fixed, bool redo, bool first) {
    const int32_t own = pair.n + warpgroup_;
    const bool has_own = own < pair.end;
    if (has_own) {
      const Stage stage = pair.stage_of(warpgroup_);
      gemm_scores(stage, pair.buffer);
      this->mask(own, stage.index, fixed);
      if (fixed) {
        this->exp2_scaled();
      } else {
        this->scale_scores();
      }
    }
    if (!fixed) {
      this->update_base(has_own, redo);
      if (has_own) this->exp2_exact();
    }
    if (has_own) hand_over_p(first);
#pragma unroll 1
    for (int32_t x = 0; x < 2; ++x) {
      if (pair.n + (warpgroup_ ^ x) < pair.end) gemm_pv(pair, warpgroup_ ^ x);
    }
  }

  __device__ __forceinline__ uint32_t records(Stage stage) const {
    return shared_ + Config::kKOffset + stage.index * Config::kStageBytes;
  }
  __device__ __forceinline__ void wait_for(Stage stage) const {
    storage_.k.consumer_wait({stage.index, static_cast<uint32_t>(stage.parity)});
  }
  // Each warp releases what it has read.
  __device__ __forceinline__ void release(Stage stage) const {
    __syncwarp();
    if (lane() == 0) storage_.k.consumer_release({stage.index});
  }

  // S of a tile. Products of E4M3 and fp16 are exact; each group of columns has a descale, and so
  // sums of its own.
  __device__ __forceinline__ void gemm_scores(Stage stage, int32_t buffer) {
    wait_for(stage);
    const uint32_t descales = records(stage) + params_.descales_in_record;
    // ldmatrix: rows of 16 bytes of this warp's keys, those of the next 16 columns behind.
    const uint32_t rows =
        records(stage) + (warp() * 16 + lane() % 16) * kRecordBytes + lane() / 16 * 16;
    Operand a[kBuffers];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::ldmatrix_x4(step_of(a[0], k), rows + params_.k_in_record + k * 32);
    }
    gemm_qk<T>(s_, a[0], Config::kRotaryOffset, true);
    prepare_v(descales, buffer);
    float sums[Config::kGroups][Base::kScores];
#pragma unroll
    for (int x = 0; x < Config::kPanelsV; ++x) {
      Operand& k = a[(x + 1) % kBuffers];
      if (x + 1 >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
      load_k(k, rows + params_.v_in_record + x * 64);
      gemm_qk<__half>(sums[x / 2], k, x * kPanelBytes, x % 2 == 0);
    }
    float4 factors[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      factors[m] = load_descales(descales + (key() + m * 8) * kRecordBytes, this->q_unit());
    }
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s_);
#pragma unroll
    for (auto& sum : sums) ptx::reg_fence(sum);
#pragma unroll
    for (int i = 0; i < Base::kScores; ++i) {
      const float4& d = factors[i / 2 % 2];
      s_[i] = fmaf(sums[0][i], d.x, fmaf(sums[1][i], d.y, s_[i])) +
              fmaf(sums[2][i], d.z, sums[3][i] * d.w);
    }
  }

  static __device__ __forceinline__ float4 load_descales(uint32_t from, float unit) {
    float x[4];
    ptx::load_shared(x, from);
    return make_float4(x[0] * unit, x[1] * unit, x[2] * unit, x[3] * unit);
  }

  // Chooses the unit of P of this warpgroup's tile, and stores the factors of its V for both.
  // descales: address of the first key's.
  __device__ __forceinline__ void prepare_v(uint32_t descales, int32_t buffer) {
    const int32_t exponents[] = {exponent_of(descales + lane() * kRecordBytes),
                                 exponent_of(descales + (lane() + 32) * kRecordBytes)};
    const int32_t most = __reduce_max_sync(~0u, max(exponents[0], exponents[1]));
    // Both warpgroups keep to the unit of the first one's last tile that they know, while it fits.
    const int32_t known = warpgroup_ == 0 ? unit_of(0, buffer ^ 1) : unit_;
    const int32_t fits = (most == 0 ? 127 : most) - storage_.lift;
    const int32_t unit = known == 0 || (most > 0 && abs(fits - known) > kUnitSlack) ? fits : known;
    if (this->thread() % 128 == 0) storage_.units[warpgroup_][buffer] = unit;
    const int32_t of_warp = warp() < 2 ? exponents[0] : exponents[1];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int32_t at = key() + 8 * m, group = lane() % 4;
      // Between 2^-122 and infinity; of keys without descales 1.
      int32_t exponent = __shfl_sync(~0u, of_warp, at % 32);
      exponent = exponent == 0 ? 127 : max(exponent, 8);
      p_factors_[m] = power_of_two(exponent - unit);
      // E4M3 is multiplied by its descale times a power of two that brings the largest to [32, 64):
      // so fp16 holds products of descales 2^-19 times as large without loss.
      const float ratio =
          __uint_as_float(ptx::load_shared(descales + at * kRecordBytes + group * 4)) *
          __int_as_float((kUnitBias + 127 - exponent) << 23);
      storage_.ratios[warpgroup_][buffer][group][at] =
          static_cast<uint16_t>(ptx::pack<__half>(ratio, ratio));
    }
  }

  // The bits of the largest magnitude of a key's descales, a power of two; 1 if all are 0.
  // descales: their address.
  static __device__ __forceinline__ int32_t exponent_of(uint32_t descales) {
    const int4 bits = ptx::load_shared_16(descales);
    const int32_t most = max(max(bits.x & INT32_MAX, bits.y & INT32_MAX),
                             max(bits.z & INT32_MAX, bits.w & INT32_MAX));
    return most >> 23;
  }
  static __device__ __forceinline__ uint32_t (&step_of(Operand& a, int k))[4] {
    return reinterpret_cast<uint32_t (&)[4]>(a[4 * k]);
  }

  // S (+)= K Q^T for a panel of Q.
  template <class Number>
  __device__ __forceinline__ void gemm_qk(float (&s)[Base::kScores], Operand& k, uint32_t panel,
                                          bool first) {
    const ptx::SmemDescriptor q = ptx::SmemDescriptor::at(shared_ + panel, 0);
    ptx::reg_fence(k);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      ptx::wgmma_rs<Number, 0>(s, &k[4 * x], q.advance(x * 32).descriptor(), !first || x > 0);
    }
    ptx::wgmma_commit();
  }

  // E4M3 of 64 columns of this warp's keys, as fp16.
  static __device__ __forceinline__ void load_k(Operand& a, uint32_t rows) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      uint32_t words[4];
      ptx::ldmatrix_x4(words, rows + x * 32);
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        uint32_t pairs[2];
        f16_of_e4m3<1>(words[y], pairs);
        const int to = 8 * x + y / 2 * 4 + y % 2;
        a[to] = pairs[0];
        a[to + 2] = pairs[1];
      }
    }
  }

  // Stores P, in s_.
  __device__ __forceinline__ void hand_over_p(bool first) {
    // The other warpgroup has read P of this one's tile before.
    if (!first) ptx::named_sync(Base::kFreeBarrier + warpgroup_, 256);
    const int32_t r = lane() % 8 + lane() / 16 * 8;
    const uint32_t to =
        p_of(warpgroup_) + r * 128 + ((2 * warp() + lane() / 8 % 2 ^ lane() % 8) << 4);
#pragma unroll
    for (int j = 0; j < Config::kTileQ / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float* const s = &s_[4 * j + 2 * x];
        words[x] = ptx::pack<__half>(s[0] * p_factors_[x % 2], s[1] * p_factors_[x % 2]);
      }
      ptx::stmatrix_x4_trans(to + j * 1024, words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_proxy();
    ptx::named_arrive(Base::kPBarrier + warpgroup_, 256);
    this->warpgroup_sync();
  }

  __device__ __forceinline__ int32_t unit_of(int32_t warpgroup, int32_t buffer) const {
    return const_cast<const volatile int32_t&>(storage_.units[warpgroup][buffer]);
  }

  static __device__ __forceinline__ float power_of_two(int32_t exponent) {
    return __int_as_float(min(max(exponent + 127, 0), 254) << 23);
  }

  __device__ __forceinline__ void change_unit(int32_t unit) {
    if (unit == unit_) return;
    const float factor = unit_ == 0 ? 1.0f : power_of_two(unit_ - unit);
    unit_ = unit;
#pragma unroll
    for (auto& part : o_) {
#pragma unroll
      for (float& x : part) x *= factor;
    }
  }

  __device__ __forceinline__ uint32_t p_of(int32_t warpgroup) const {
    return shared_ + Config::kPOffset + warpgroup * kPanelBytes;
  }

  // O += V^T P^T of the tile whose P that warpgroup has handed over, for this warpgroup's columns
  // of V. Releases the stage.
  __device__ __forceinline__ void gemm_pv(const Pair& pair, int32_t warpgroup) {
    const Stage stage = pair.stage_of(warpgroup);
    if (warpgroup != warpgroup_) {
      ptx::named_sync(Base::kPBarrier + warpgroup, 256);
      wait_for(stage);
    }
    change_unit(unit_of(warpgroup, pair.buffer));
    const ptx::SmemDescriptor p = ptx::SmemDescriptor::at(p_of(warpgroup), 0);
    // ldmatrix: rows of 16 bytes of 32 keys.
    const uint32_t rows = records(stage) + params_.v_in_record + lane() * kRecordBytes +
                          warpgroup_ * kColumns + warp() * 16;
    const uint32_t factors = ptx::shared_address(
        &storage_.ratios[warpgroup][pair.buffer][warpgroup_ * (kColumns / kLatentDescaleDim)]
                        [lane() % 4 * 2]);
    Operand a[kBuffers];
    uint32_t of_keys[kTileKv / 8];  // factors of a group's columns, for pairs of keys
#pragma unroll
    for (int i = 0; i < kPartsOfO; ++i) {
      Operand& v = a[i % kBuffers];
      if (i * 64 % kLatentDescaleDim == 0) {
#pragma unroll
        for (int x = 0; x < kTileKv / 8; ++x) {
          of_keys[x] =
              ptx::load_shared(factors + i * 64 / kLatentDescaleDim * kTileKv * 2 + x * 16);
        }
      }
      if (i >= kBuffers) ptx::wgmma_wait<kBuffers - 1>();
      load_v(v, rows + i * 64, of_keys);
      ptx::reg_fence(v);
      ptx::wgmma_fence();
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        ptx::wgmma_rs<__half, 0>(o_[i], &v[4 * x], p.advance(x * 32).descriptor(), 1);
      }
      ptx::wgmma_commit();
    }
    release(stage);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& part : o_) ptx::reg_fence(part);
    if (warpgroup != warpgroup_ && pair.n + warpgroup + 2 < pair.end) {
      ptx::named_arrive(Base::kFreeBarrier + warpgroup, 256);
    }
  }

  // 64 keys of 16 columns of V, transposed, as fp16 times their factors: a lane has columns 2 g and
  // 2 g + 1 in rows g and g + 8, g = lane / 4.
  static __device__ __forceinline__ void load_v(Operand& a, uint32_t rows,
                                                const uint32_t (&factors)[kTileKv / 8]) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, rows + x * 32 * kRecordBytes);
#pragma unroll
      for (int y = 0; y < 4; ++y) {
        uint32_t pairs[2];
        f16_of_e4m3<2>(words[y], pairs);
        const int to = 8 * x + y / 2 * 4 + y % 2 * 2;
        a[to] = ptx::mul_f16x2(pairs[0], factors[4 * x + y]);
        a[to + 1] = ptx::mul_f16x2(pairs[1], factors[4 * x + y]);
      }
    }
  }

  float p_factors_[2];  // by which P of this lane's keys is multiplied
};

}  // namespace flashattn::cuda::sm90
