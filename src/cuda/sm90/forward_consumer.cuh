// The consumers of the Hopper forward pass: a warpgroup for 64 rows.
#pragma once

#include <type_traits>

#include "cuda/sm90/forward_scores.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class Consumer : TileScores<Config> {
  using Base = TileScores<Config>;
  using T = typename Config::T;
  using Base::control_, Base::group_, Base::items_, Base::leader_, Base::params_, Base::q_place_;
  using Base::drop, Base::factor, Base::hide_blocks, Base::item, Base::kept, Base::lane;
  using Base::kConsumers, Base::kTileKv, Base::kTileQ;
  using Base::mask, Base::modify, Base::release_q, Base::row, Base::strip, Base::tiles_;
  static constexpr int kStages = Config::kStages;
  using Place = Ring<kStages>;
  using typename Base::Line;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, uint32_t shared,
                                      Control<Config>& control, int32_t group)
      : Base(params, shared, control, group),
        q_(ptx::Matrix::at(shared + group * 64 * 128, 0)),
        k_(ptx::Matrix::at(shared + Config::kK, 0)),
        v_(ptx::Matrix::at(shared + Config::kV, kTileKv * 128)) {}

  __device__ __forceinline__ void run() {
    if (Config::kTurns && group_ == 0) ptx::named_arrive(kTurnBarrier, 256);
    for (;; items_.advance()) {
      ptx::mbarrier_wait(address(control_.item_full[items_.slot()]), items_.phase());
      const ItemKind kind = item().kind;
      if (kind == ItemKind::kEnd) break;
      if (kind == ItemKind::kTile) work();
      __syncwarp();
      if (lane() == 0) {
        if (kind == ItemKind::kDrain) ptx::mbarrier_arrive(address(control_.drained));
        ptx::mbarrier_arrive(address(control_.item_empty[items_.slot()]));
      }
    }
    if (leader_) ptx::bulk_wait();
  }

 private:
  __device__ __forceinline__ void work() {
    tiles_.start();
    // Read at once: one by one each would be waited for.
    const int32_t begin = item().begin, first = strip().begin, end = strip().end;
    const int32_t full = max(strip().full_begin, first);
    const int32_t fast = Config::kSafe ? first : max(strip().fast_end, first);
    int32_t n = item().end - 1;
    ptx::mbarrier_wait(address(control_.q_full[q_place_.slot()][group_]), q_place_.phase());
    // All warpgroups take item.end - item.begin - 1 turns.
    if (first >= end) {  // no row of this warpgroup sees a key
      clear();
      keep_together();
      if (Config::kOwnO) release_q();
      if (n >= begin) pass(n--, false);
    } else {
      for (; n >= end; --n) pass(n, true);
      n = tiles_.down(item(), n, first);
      start(n--);
#pragma unroll 1
      for (; (n = tiles_.down(item(), n, fast)) >= fast; --n) step<true>(n);
      if constexpr (!Config::kSafe) {
#pragma unroll 1
        for (; n >= full; --n) step<false>(n);
#pragma unroll 1
        for (; n >= first; --n) step<true>(n);
      }
      ptx::mbarrier_wait(address(control_.v_full[place_.slot()]), place_.phase());
      multiply_pv(place_);
      ptx::wgmma_wait<0>();
      ptx::pin(o_);
      release(control_.v_empty, place_);
      place_.advance();
    }
    for (; n >= begin; --n) pass(n, true);
    finish();
    q_place_.advance();
  }

  // A tile of keys of which this warpgroup needs nothing.
  __device__ __forceinline__ void pass(int32_t, bool turn) {
    if (Config::kTurns && turn) {
      take_turn();
      pass_turn();
    }
    ptx::mbarrier_wait(address(control_.k_full[place_.slot()]), place_.phase());
    ptx::mbarrier_wait(address(control_.v_full[place_.slot()]), place_.phase());
    keep_together();
    release(control_.k_empty, place_);
    release(control_.v_empty, place_);
    place_.advance();
  }

  // Where no product does, before a buffer is released: of the four warps none may fall behind by a
  // whole phase of its barrier.
  __device__ __forceinline__ void keep_together() const {
    ptx::named_sync(kGroupBarrier + group_, 128);
  }

  // The first tile of keys: Q K^T and the softmax.
  __device__ __forceinline__ void start(int32_t n) {
    ptx::mbarrier_wait(address(control_.k_full[place_.slot()]), place_.phase());
    multiply_qk(place_);
    clear();
    ptx::wgmma_wait<0>();
    ptx::pin(s_);
    release(control_.k_empty, place_);
    if (Config::kOwnO && n == strip().begin) release_q();
    Line line;
    if (!item().safe && this->find_line(s_, n, line)) {
      float peak[2];
      this->find_peaks(peak);
      hide(n);
      // Lower than expected: numbers hold more above the reference than below it.
      raise_reference(line.scale, {peak[0] - kSlack, peak[1] - kSlack});
      weigh_line(line);
    } else {
      modify(s_, n);
      hide(n);
      raise_reference(factor(), {0.0f, 0.0f});
      weigh();
    }
    drop(s_, n);
    pack();
    if (params_.kv_has_tail && (n + 1) * kTileKv > item().len.kv) clear_tail(n);
  }

  // Q K^T of tile n under P V of tile n + 1; then the softmax of n, under the products of the other
  // warpgroups.
  template <bool kSafe>
  __device__ __forceinline__ void step(int32_t n) {
    const Place values = place_;
    place_.advance();
    const bool last = n == strip().begin;
    ptx::mbarrier_wait(address(control_.k_full[place_.slot()]), place_.phase());
    if (Config::kTurns) take_turn();
    multiply_qk(place_);
    ptx::mbarrier_wait(address(control_.v_full[values.slot()]), values.phase());
    multiply_pv(values);
    if (Config::kTurns) pass_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(s_);
    release(control_.k_empty, place_);
    if (Config::kOwnO && last) release_q();
    float shrink[2];
    Line line;
    if (!kSafe && this->find_line(s_, n, line)) {
      weigh_line(line);
    } else {
      modify(s_, n);
      if constexpr (kSafe) {
        hide(n);
        raise_reference(factor(), {0.0f, 0.0f}, shrink);
      }
      weigh();
    }
    drop(s_, n);
    ptx::wgmma_wait<0>();
    ptx::pin(o_);
    release(control_.v_empty, values);
    pack();
    if constexpr (kSafe) rescale(shrink);
  }

  __device__ __forceinline__ void hide(int32_t n) {
    mask(s_, n);
    hide_blocks(s_, n);
  }

  __device__ __forceinline__ void take_turn() { ptx::named_sync(kTurnBarrier + group_, 256); }

  __device__ __forceinline__ void pass_turn() {
    ptx::named_arrive(kTurnBarrier + (group_ + 1) % kConsumers, 256);
  }

  // By one thread for all: the product that read the buffer was one of all four warps.
  __device__ __forceinline__ void release(uint64_t (&empty)[kStages], const Place& place) const {
    if (leader_) ptx::mbarrier_arrive(address(empty[place.slot()]));
  }

  __device__ __forceinline__ void clear() {
    float sink = -INFINITY;
    if (params_.problem.features & FLASHATTN_FEATURE_SINK) {
      sink = params_.args.inputs.sink[item().h] * kLog2E;
    }
    const Lengths len{item().len.q, item().len.kv};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference_[half] = sink;
      // Every lane of a quad sums its own columns: one of them counts the sink.
      sum_[half] = sink == -INFINITY || lane() % 4 != 0 ? 0.0f : 1.0f;
    }
    if (lane() < 16) {
      const int32_t r = row() - lane() / 4 + lane();
      control_.visible[r] = visible_keys(params_.problem.mask_rule(), item().query + r, len);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Config::kDimV / 2; ++i) o_[i] = 0.0f;
  }

  __device__ __forceinline__ void multiply_qk(const Place& place) {
    const ptx::Matrix k = k_.further(place.slot() * Config::kKBytes);
    // Large heads: or the compiler keeps all addresses in registers that it does not have.
    const ptx::Matrix first{Config::kDimQk > 128 ? opaque(q_.low) : q_.low};
    const ptx::Matrix q = first.further(q_place_.slot() * Config::kQBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < Config::kDimQk / 16; ++x) {
      ptx::wgmma_ss<T, 0, 0>(s_, q.further(x / 4 * kTileQ * 128 + x % 4 * 32).descriptor(),
                             k.further(x / 4 * kTileKv * 128 + x % 4 * 32).descriptor(), x > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_pv(const Place& place) {
    const ptx::Matrix v = v_.further(place.slot() * Config::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kTileKv / 16; ++x) {
      ptx::wgmma_rs<T, 1>(o_, &p_[4 * x], v.further(x * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  // Raises the rows' references to the tile's maxima, times c and raised, where these are higher by
  // enough to matter. shrink: what O must be multiplied with.
  __device__ __forceinline__ void raise_reference(float c, const float (&raised)[2],
                                                  float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[4];  // four chains: latency
#pragma unroll
      for (int i = 0; i < kTileKv / 8; ++i) {
        const float x = fmaxf(s_[4 * i + 2 * half], s_[4 * i + 2 * half + 1]);
        top[i % 4] = i < 4 ? x : fmaxf(top[i % 4], x);
      }
      float highest = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      highest = fmaf(highest, c, raised[half]);
      const float before = reference_[half];
      const bool keep = !(highest > before + kSlack);
      reference_[half] = keep ? before : highest;
      shrink[half] = keep ? 1.0f : ptx::exp2(before - highest);
      sum_[half] *= shrink[half];
    }
  }

  __device__ __forceinline__ void raise_reference(float c, const float (&raised)[2]) {
    float shrink[2];
    raise_reference(c, raised, shrink);
  }

  // Scores to weights, and their sums: of a tile first, so that few roundings meet a large sum, and
  // in one chain a row: with more, ptxas waits for P V before most exponentials (D = 64: -4 %).
  // exponent(x, i): of score number i.
  template <class Exponent>
  __device__ __forceinline__ void weigh(Exponent exponent) {
    float total[2];
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) {
      s_[i] = ptx::exp2(exponent(s_[i], i));
      float& t = total[i / 2 % 2];
      t = i < 4 && i % 2 == 0 ? s_[i] : t + s_[i];
    }
    sum_[0] += total[0];
    sum_[1] += total[1];
  }

  __device__ __forceinline__ void weigh() {
    const float c = factor();
    weigh([&](float x, int i) { return fmaf(x, c, -base(i / 2 % 2)); });
  }

  __device__ __forceinline__ void weigh_line(const Line& line) {
    const float first[2] = {line.first[0] - base(0), line.first[1] - base(1)};
    weigh([&](float x, int i) {
      const float column = static_cast<float>(i / 4 * 8 + i % 2);
      return fmaf(x, line.scale, fmaf(line.slope, column, first[i / 2 % 2]));
    });
  }

  // The reference of a row that has seen nothing is 0: weights of 0, not NaN.
  __device__ __forceinline__ float base(int half) const {
    return reference_[half] == -INFINITY ? 0.0f : reference_[half];
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) p_[i] = ptx::pack<T>(s_[2 * i], s_[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    // After the first tiles maxima rarely rise.
    if (__all_sync(~0u, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kDimV / 2; ++i) o_[i] *= shrink[i / 2 % 2];
  }

  // Zeros in place of the values past the last key: their weights are 0, but they may be NaN.
  __device__ __forceinline__ void clear_tail(int32_t n) {
    ptx::mbarrier_wait(address(control_.v_full[place_.slot()]), place_.phase());
    const uint32_t v = v_.address() + place_.slot() * Config::kVBytes;
    const int32_t first = item().len.kv - n * kTileKv, rows = kTileKv - first;
    for (int32_t x = threadIdx.x % 128; x < rows * 8 * Config::kPanelsV; x += 128) {
      const int32_t row = first + x / 8 % rows, panel = x / 8 / rows;
      ptx::clear_shared_16(v + (panel * kTileKv + row) * 128 + x % 8 * 16);
    }
    ptx::fence_async_proxy();
    ptx::named_sync(kGroupBarrier + group_, 128);
  }

  // LSE and O of the tile; whether it must be done over. Both rows at once, without branches:
  // nothing else covers the latencies.
  __device__ __forceinline__ void finish() {
    float factor[2], finite[2][4] = {};  // stays 0 while all is finite
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum_[half] += __shfl_xor_sync(~0u, sum_[half], mask);
      }
    }
#pragma unroll
    for (int x = 0; x < Config::kDimV / 2; ++x) {
      float& f = finite[x / 2 % 2][x / 4 % 4];
      f = fmaf(o_[x], 0.0f, f);
    }
    bool outgrown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float l = sum_[half];
      const float all = (finite[half][0] + finite[half][1]) + (finite[half][2] + finite[half][3]);
      bool bad = !(l <= kMost && all == 0.0f);
      if (Config::kScores == Scores::kShaped) {
        bad |= l < kLeast && reference_[half] != -INFINITY;
      }
      outgrown |= bad && item().query + row() + half * 8 < item().len.q;
      factor[half] = l == 0.0f ? 0.0f : ptx::reciprocal(l) * kept();
    }
#pragma unroll
    for (int x = 0; x < Config::kDimV / 2; ++x) o_[x] *= factor[x / 2 % 2];
    if constexpr (!Config::kSafe) {
      if (__any_sync(~0u, outgrown) && !item().safe && lane() == 0) {
        control_.again[item().index] = item().tile + 1;
        control_.outgrown = 1;
      }
    }
    if (params_.problem.dtype_o == FLASHATTN_DTYPE_F32) {
      this->store_fp32(o_);
    } else {
#pragma unroll
      for (int piece = 0; piece < Config::kOPieces; ++piece) {
        this->stage(o_, piece);
        if (params_.store_boxes) {
          this->store_boxes(piece);
        } else {
          this->store_rows(piece);
        }
      }
    }
    // O lay where the next Q comes.
    if (!Config::kOwnO) {
      if (!params_.store_boxes) {
        ptx::fence_async_proxy();
        ptx::named_sync(kGroupBarrier + group_, 128);
      }
      if (leader_) {
        ptx::bulk_wait_read();
        release_q();
      }
    }
    store_lse();
  }

  // Of a quad's two rows the first two lanes store one each.
  __device__ __forceinline__ void store_lse() const {
    const int32_t half = lane() % 4;
    const int32_t i = item().query + row() + half * 8;
    if (half > 1 || params_.args.lse == nullptr || i >= item().len.q) return;
    const RowLayout layout = row_layout(params_.problem, params_.args.shape);
    const int64_t place = item().b * layout.batch_stride + item().h * layout.head_stride;
    const float l = half == 0 ? sum_[0] : sum_[1];
    const float lse = ((half == 0 ? reference_[0] : reference_[1]) + log2f(l)) * kLn2;
    params_.args.lse[place + item().first_q + i] = l == 0.0f ? -INFINITY : lse;
  }

  static constexpr float kSlack = 8.0f;  // log2; a lower maximum need not be followed
  // Of a row's sum. Less only where the reference was foreseen, not seen: fp16 has few numbers
  // there.
  static constexpr float kMost = 0x1p100f;
  static constexpr float kLeast = std::is_same<T, __half>::value ? 0x1p-2f : 0x1p-60f;

  const ptx::Matrix q_, k_, v_;
  Place place_;
  float reference_[2], sum_[2];  // log2 units; the sums are of this lane's columns
  float s_[kTileKv / 2];
  uint32_t p_[kTileKv / 4];
  float o_[Config::kDimV / 2];
};

}  // namespace flashattn::cuda::sm90
