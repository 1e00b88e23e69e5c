// The consumers of the Hopper forward pass: a warpgroup for 64 rows.
#pragma once

#include <type_traits>

#include "cuda/kernels/sm90/fwd_softmax.cuh"
#include "wgmma.cuh"

namespace flashattn::cuda::sm90 {

template <class Config>
class Consumer : Softmax<Config> {
  using Base = Softmax<Config>;
  using T = typename Config::T;
  using Base::base, Base::drop, Base::factor, Base::half_, Base::item, Base::kept, Base::lane;
  using Base::control_, Base::group_, Base::items_, Base::leader_, Base::params_, Base::q_place_;
  using Base::kConsumers, Base::kSlack, Base::kTileKv, Base::kTileQ;
  using Base::raise_reference, Base::reference_, Base::release_q, Base::row, Base::s_;
  using Base::strip, Base::sum_, Base::tiles_, Base::weigh;
  static constexpr int kStages = Config::kStages;
  using Place = PipelineState<kStages>;
  using typename Base::Drops, typename Base::Line, typename Base::Slope;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, uint32_t shared,
                                      Control<Config>& control, int32_t group)
      : Base(params, shared, control, group),
        q_(ptx::SmemDescriptor::at(shared + group * 64 * 128, 0)),
        k_(ptx::SmemDescriptor::at(shared + Config::kK, 0)),
        v_(ptx::SmemDescriptor::at(shared + Config::kV, kTileKv * 128)) {}

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
  // What is done to a tile's products.
  enum class Way {
    kSafe,    // all that may be needed
    kMasked,  // all but a new reference: every row has one
    kScaled,  // no more than the scale: every row sees every key and has a reference
    kCapped,  // so too, but a softcap
    kSloped,  // so too, but ALiBi
    kTied,    // so too, but ALiBi of tied rows with all keys before them
  };

  // Tiles n down to `full`. Returns the next. A loop for each way: with two in one, registers are
  // copied from tile to tile.
  __device__ __forceinline__ int32_t fast_steps(int32_t n, int32_t full) {
    if constexpr (Config::kScoreMod == ScoreModKind::kPlain || Config::kDropped) {
#pragma unroll 1
      for (; n >= full; --n) step<Way::kScaled>(s_, n);
    } else if constexpr (Config::kScoreMod == ScoreModKind::kSoftcap) {
#pragma unroll 1
      for (; n >= full; --n) step<Way::kCapped>(s_, n);
    } else {
      const Slope slope = this->slope();
      const int32_t tied = slope.tied ? max(full, slope.line_end) : full;
#pragma unroll 1
      for (; n >= tied; --n) step<Way::kSloped>(s_, n, slope);
#pragma unroll 1
      for (; n >= full; --n) step<Way::kTied>(s_, n, slope);
    }
    return n;
  }

  __device__ __forceinline__ void work() {
    tiles_.reset();
    // Read at once: one by one each would be waited for.
    const int32_t begin = item().begin, first = strip().begin, end = strip().end;
    const int32_t full = max(strip().full_begin, first);
    const int32_t fast = Config::kSafe ? first : max(strip().fast_end, first);
    const bool upper = Config::kHalves && strip().upper_half;
    const bool lower = Config::kHalves && strip().lower_half;
    int32_t n = item().end - 1;
    ptx::mbarrier_wait(address(control_.q_full[q_place_.slot()][group_]), q_place_.phase());
    // All warpgroups take item.end - item.begin - 1 turns.
    if (first >= end) {  // no row of this warpgroup sees a key
      clear();
      keep_together();
      if (Config::kOwnO) release_q();
      if (n >= begin) pass(n--, false);
    } else {
      if constexpr (Config::kStartFirst) {
        // Its own first tile before those that only others need, as far as buffers allow.
        for (; n - end >= kStages - 1; --n) pass(n, true);
        start(end - 1, Place{place_.count + (n + 1 - end)}, lower);
        for (; n >= end; --n) pass(n, true);
        --n;
      } else {
        for (; n >= end; --n) pass(n, true);
        n = tiles_.last_visible(item(), n, first);
        start(n--, place_, lower);
      }
#pragma unroll 1
      for (; (n = tiles_.last_visible(item(), n, fast)) >= fast; --n) step<Way::kSafe>(s_, n);
      if constexpr (!Config::kSafe) {
        for (int half = 0; half < 2; ++half) reference_[half] = base(half);  // they stay
        n = fast_steps(n, full);
        const int32_t whole = upper ? first + 1 : first;
#pragma unroll 1
        for (; n >= whole; --n) step<Way::kMasked>(s_, n);
        if constexpr (Config::kHalves) {
          if (upper && n == first) step<Way::kMasked, Part::kUpper>(half_, n--);
        }
      }
      ptx::mbarrier_wait(address(control_.v_full[place_.slot()]), place_.phase());
      multiply_pv(place_);
      await_values(place_);
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

  // The first tile of keys, or its lower half: Q K^T and the softmax.
  __device__ __forceinline__ void start(int32_t n, const Place& place, bool half) {
    ptx::mbarrier_wait(address(control_.k_full[place.slot()]), place.phase());
    if constexpr (Config::kHalves) {
      half ? start<Part::kLower>(half_, n, place) : start<Part::kWhole>(s_, n, place);
    } else {
      start<Part::kWhole>(s_, n, place);
    }
    // Then it is the item's first, and `place` the present one.
    if (params_.kv_has_tail && (n + 1) * kTileKv > item().len.kv) clear_tail(n);
  }

  template <Part kPart, int kCount>
  __device__ __forceinline__ void start(float (&s)[kCount], int32_t n, const Place& place) {
    multiply_qk<kPart>(s, place);
    clear();
    const bool over = item().safe;
    Drops drops;
    this->draw(drops, n);
    ptx::wgmma_wait<0>();
    ptx::reg_fence(s);
    release(control_.k_empty, place);
    if (Config::kOwnO && n == strip().begin) release_q();
    if constexpr (Config::kScoreMod == ScoreModKind::kAlibi) {
      Line line = this->line_of(this->slope(), n);
      float raised[2] = {0.0f, 0.0f};
      if (strip().fast_end > 0 && line.straight) {
        this->find_peaks(raised);
        // Lower than expected: numbers hold more above the reference than below it.
        for (float& peak : raised) peak -= kSlack;
      } else {
        this->modify(s, n * kTileKv, over);
        line = {1.0f, 0.0f};  // nothing is left to do
      }
      hide<kPart>(s, n);
      raise_reference(s, line.scale, raised, over);
      if (over) {
        this->weigh_safely(s, over);
      } else {
        this->weigh_bent(s, line);
      }
    } else {
      this->modify(s, n * kTileKv, over);
      hide<kPart>(s, n);
      raise_reference(s, score_factor(over), {0.0f, 0.0f}, over);
      this->weigh_safely(s, over);
    }
    drop(s_, n);
    pack<kPart>(s, drops);
  }

  // Q K^T of tile n under P V of tile n + 1; then the softmax of n, under the products of the other
  // warpgroups.
  template <Way kWay, Part kPart = Part::kWhole, int kCount>
  __device__ __forceinline__ void step(float (&s)[kCount], int32_t n, const Slope& slope = {}) {
    const Place values = place_;
    place_.advance();
    const bool last = n == strip().begin;
    ptx::mbarrier_wait(address(control_.k_full[place_.slot()]), place_.phase());
    if (Config::kTurns) take_turn();
    multiply_qk<kPart>(s, place_);
    ptx::mbarrier_wait(address(control_.v_full[values.slot()]), values.phase());
    multiply_pv(values);
    if (Config::kTurns) pass_turn();
    Drops drops;
    this->draw(drops, n);
    // Found while products are computed: nothing covers what follows them.
    Line line;
    if constexpr (kWay == Way::kSloped) line = this->line_of(slope, n);
    ptx::wgmma_wait<1>();
    ptx::reg_fence(s);
    release(control_.k_empty, place_);
    if (Config::kOwnO && last) release_q();
    if (Config::kAwaitFirst) await_values(values);
    float shrink[2];
    if constexpr (kWay == Way::kSloped) {
      this->weigh_line(s, line);
    } else if constexpr (kWay == Way::kTied) {
      this->weigh_tied(slope, n, o_[0]);
    } else if constexpr (kWay == Way::kCapped) {
      this->weigh_capped();
    } else {
      const bool over = kWay == Way::kSafe && item().safe;
      this->modify(s, n * kTileKv + Base::template kFirst<kPart>, over);
      if constexpr (kWay != Way::kScaled) hide<kPart>(s, n);
      if constexpr (kWay == Way::kSafe) {
        raise_reference(s, score_factor(over), {0.0f, 0.0f}, over, shrink);
        this->weigh_safely(s, over);
      } else {
        this->weigh_with(s, reference_);
      }
    }
    drop(s_, n);
    if (!Config::kAwaitFirst) await_values(values);
    pack<kPart>(s, drops);
    if constexpr (kWay == Way::kSafe) rescale(shrink);
  }

  __device__ __forceinline__ void await_values(const Place& values) {
    ptx::wgmma_wait<0>();
    ptx::reg_fence(o_);
    release(control_.v_empty, values);
  }

  // What rows do not see of a tile, or of a half of it.
  template <Part kPart, int kCount>
  __device__ __forceinline__ void hide(float (&s)[kCount], int32_t n) {
    if constexpr (kPart == Part::kWhole) {
      Base::hide(n);
    } else {
      this->mask(s, n * kTileKv + Base::template kFirst<kPart>);
    }
  }

  __device__ __forceinline__ void take_turn() { ptx::named_sync(kTurnBarrier + group_, 256); }

  __device__ __forceinline__ void pass_turn() {
    ptx::named_arrive(kTurnBarrier + (group_ + 1) % kConsumers, 256);
  }

  // By one thread for all: the product that read the buffer was one of all four warps.
  __device__ __forceinline__ void release(uint64_t (&empty)[kStages], const Place& place) const {
    if (leader_) ptx::mbarrier_arrive(address(empty[place.slot()]));
  }

  // What scores, as modify() leaves them, are multiplied with to be in units of the reference.
  __device__ __forceinline__ float score_factor(bool over) const {
    return Config::kScoreMod == ScoreModKind::kRuntime || over ? 1.0f : factor();
  }

  __device__ __forceinline__ void clear() {
    const Lengths len{item().len.q, item().len.kv};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference_[half] = -INFINITY;
      sum_[half] = 0.0f;
    }
    if (lane() < 16) {
      const int32_t r = row() - lane() / 4 + lane();
      control_.visible[r] = visible_keys(params_.problem.mask_rule(), item().query + r, len);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Config::kDimV / 2; ++i) o_[i] = 0.0f;
  }

  template <Part kPart, int kCount>
  __device__ __forceinline__ void multiply_qk(float (&s)[kCount], const Place& place) {
    const ptx::SmemDescriptor k =
        k_.advance(place.slot() * Config::kKBytes + Base::template kFirst<kPart> * 128);
    // Large heads: or the compiler keeps all addresses in registers that it does not have.
    const ptx::SmemDescriptor first{Config::kDimQk > 128 ? no_hoist(q_.low) : q_.low};
    const ptx::SmemDescriptor q = first.advance(q_place_.slot() * Config::kQBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < Config::kDimQk / 16; ++x) {
      ptx::wgmma_ss<T, 0, 0>(s, q.advance(x / 4 * kTileQ * 128 + x % 4 * 32).descriptor(),
                             k.advance(x / 4 * kTileKv * 128 + x % 4 * 32).descriptor(), x > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_pv(const Place& place) {
    const ptx::SmemDescriptor v = v_.advance(place.slot() * Config::kVBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kTileKv / 16; ++x) {
      ptx::wgmma_rs<T, 1>(o_, &p_[4 * x], v.advance(x * 2048).descriptor(), 1);
    }
    ptx::wgmma_commit();
  }

  template <Part kPart, int kCount>
  __device__ __forceinline__ void pack(const float (&s)[kCount], const Drops& drops) {
    constexpr int kFrom = Base::template kFirst<kPart> / 4;
#pragma unroll
    for (int i = 0; i < kTileKv / 4; ++i) {
      const int x = 2 * (i - kFrom);
      p_[i] = x < 0 || x >= kCount ? 0 : ptx::pack<T>(s[x], s[x + 1]);
      if constexpr (Config::kDropped) p_[i] &= ~ptx::spread_signs(drops[i]);
    }
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
    this->finish_sums(finite, factor);
#pragma unroll
    for (int x = 0; x < Config::kDimV / 2; ++x) o_[x] *= factor[x / 2 % 2];
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
    this->store_lse(item().safe);
  }

  const ptx::SmemDescriptor q_, k_, v_;
  Place place_;
  uint32_t p_[kTileKv / 4];
  float o_[Config::kDimV / 2];
};

}  // namespace flashattn::cuda::sm90
