// lse2, delta and the counters of dQ, head by head, so that the backward kernel can start with the
// first heads. What counts is the time of multiprocessors that this one takes from it: boxes of O
// and dO come by the copy engine, as many as shared memory holds, and their rows' products are
// the diagonal of O dO^T by the tensor cores. All blocks prepare the first heads and let the next
// kernel start; few stay for the others. On an H200 that hides 25 of 38 us.
#include "cuda/kernels/sm90/bwd_preprocess.h"

#include "cuda/kernels/common/lse_recompute.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kPassed = 8;                   // heads that a warp may be ahead of others
constexpr int kPanelBytes = kBoxRows * 128;  // of a box: 64 columns

template <int kWarps>
struct Control {
  uint64_t full[kWarps];     // a warp's box
  uint64_t passed[kPassed];  // a head, by all warps; the one that tells waits for it
};

// Heads of kPanels * 64 columns. Each warp but the last has a box of O and of dO at work; the last
// tells how far all are.
template <class T, int kPanels>
class Preparer {
  static constexpr int kBoxBytes = 2 * kPanels * kPanelBytes;
  static constexpr int kWarps = kPanels == 1 ? 23 : 14;

 public:
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kSharedBytes =
      kWarps * kBoxBytes + static_cast<int>(sizeof(Control<kWarps>));

  __device__ __forceinline__ explicit Preparer(const PrepareParams& params)
      : params_(params),
        common_(params.common),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        box_(ptx::shared_address(ptx::dynamic_shared()) + warp_ * kBoxBytes),
        control_(*reinterpret_cast<Control<kWarps>*>(ptx::dynamic_shared() + kWarps * kBoxBytes)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : control_.full) ptx::mbarrier_init(at(barrier), 1);
      for (uint64_t& barrier : control_.passed) ptx::mbarrier_init(at(barrier), kWarps + 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddep_wait();
    if (blockIdx.x == 0) begin();
    if (threadIdx.x < kMostPreparers) clear_word(threadIdx.x);
    Place place{};
    if (warp_ < kWarps) {
      place = shared_place(blockIdx.x + gridDim.x * warp_);
      expect(place);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) load(place, p);
      while (!place.own) prepare(place);
    }
    __syncthreads();
    ptx::griddep_launch_dependents();
    if (warp_ == kWarps && lane_ == 0) arrive();
    if (static_cast<int32_t>(blockIdx.x) >= params_.preparers) return;
    if (warp_ == kWarps) {
      if (lane_ == 0) tell();
      return;
    }
    int32_t passed = 0;
    pass(passed, place);
    while (place.head < params_.heads) {
      prepare(place);
      pass(passed, place);
    }
  }

 private:
  // A box of a head: by number of those of the heads that all blocks share, or of a block's own.
  struct Place {
    bool own;
    int32_t box, head, row;
  };

  static __device__ __forceinline__ uint32_t at(uint64_t& barrier) {
    return ptx::shared_address(&barrier);
  }

  // Of this block's own heads the n-th.
  __device__ __forceinline__ int32_t own_head(int32_t n) const {
    return params_.first_heads + n * params_.preparers + blockIdx.x;
  }

  __device__ __forceinline__ Place own_place(int32_t box) const {
    const int32_t n = params_.boxes.quotient(box);
    const bool some = static_cast<int32_t>(blockIdx.x) < params_.preparers;
    return {true, box, some ? own_head(n) : params_.heads,
            (box - n * params_.boxes.divisor) * kBoxRows};
  }

  __device__ __forceinline__ Place shared_place(int32_t box) const {
    const int32_t head = params_.boxes.quotient(box);
    if (head >= params_.first_heads) return own_place(warp_);
    return {false, box, head, (box - head * params_.boxes.divisor) * kBoxRows};
  }

  __device__ __forceinline__ Place after(const Place& place) const {
    return place.own ? own_place(place.box + kWarps)
                     : shared_place(place.box + kWarps * static_cast<int32_t>(gridDim.x));
  }

  // The first block.
  __device__ __forceinline__ void begin() const {
    clear_counters(common_, kThreads, 0);
    if (threadIdx.x != 0) return;
    params_.prepared->blocks = 0;
    ptx::store_release(&params_.prepared->begun, params_.stamp);
  }

  // This block has prepared its part of the first heads. The last to come says so, for all.
  __device__ __forceinline__ void arrive() const {
    Preparation& all = *params_.prepared;
    while (ptx::load_acquire(&all.begun) != params_.stamp) __nanosleep(100);
    const int32_t before = ptx::fetch_add_acquire_release(&all.blocks, 1);
    if (before != static_cast<int32_t>(gridDim.x) - 1) return;
    ptx::store_relaxed(&all.begun, uint64_t{0});
    ptx::store_release(&all.ready, params_.stamp);
  }

  // A block's own word, the first block those of no block.
  __device__ __forceinline__ void clear_word(int32_t n) const {
    const bool some = n < params_.preparers && params_.first_heads + n < params_.heads;
    if (static_cast<int32_t>(blockIdx.x) == (n < params_.preparers ? n : 0)) {
      params_.prepared->heads[n] = some ? params_.first_heads + n : INT32_MAX;
    }
  }

  // The warp has nothing left to do before the place.
  __device__ __forceinline__ void pass(int32_t& passed, const Place& place) const {
    for (; own_head(passed) < min(place.head, params_.heads); ++passed) {
      __syncwarp();
      if (lane_ != 0) continue;
      const uint32_t barrier = at(control_.passed[passed % kPassed]);
      ptx::mbarrier_wait(barrier, passed / kPassed & 1 ^ 1);
      ptx::mbarrier_arrive(barrier);
    }
  }

  // Tells what all warps have passed, whenever they have not passed more meanwhile: with all that
  // is loaded, a release takes long.
  __device__ __forceinline__ void tell() const {
    int32_t* const word = params_.prepared->heads + blockIdx.x;
    for (int32_t n = 0; own_head(n) < params_.heads; ++n) {
      const uint32_t barrier = at(control_.passed[n % kPassed]);
      ptx::mbarrier_arrive(barrier);
      if (ptx::mbarrier_test(barrier, n / kPassed & 1)) continue;
      ptx::store_release(word, own_head(n));
      ptx::mbarrier_wait(barrier, n / kPassed & 1);
    }
    ptx::store_release(word, INT32_MAX);
  }

  // Announces the boxes of a place, and loads the numbers of the lane's row.
  __device__ __forceinline__ void expect(const Place& place) {
    lse_ = -INFINITY;
    dlse_ = 0.0f;
    if (place.head >= params_.heads) return;
    if (lane_ == 0) ptx::mbarrier_expect(at(control_.full[warp_]), kBoxBytes);
    const int32_t b = params_.heads_q.quotient(place.head);
    const int32_t h = place.head - b * params_.heads_q.divisor, row = place.row + lane_;
    const SeqlenInfo sequence =
        seqlen_info(common_.problem, common_.args.shape, common_.args.inputs, b);
    if (row >= sequence.len.q) return;
    const int64_t number = common_.row(b, h, row);
    lse_ = common_.args.lse[number];
    if (common_.args.dlse) dlse_ = common_.args.dlse[number];
  }

  __device__ __forceinline__ void load(const Place& place, int panel) const {
    if (place.head >= params_.heads || !ptx::elect()) return;
    const int32_t b = params_.heads_q.quotient(place.head);
    const ptx::BoxPosition from{panel * 64, place.row, place.head - b * params_.heads_q.divisor, b};
    const uint32_t full = at(control_.full[warp_]), to = box_ + panel * 2 * kPanelBytes;
    ptx::tma_load(to, &params_.o, full, from, ptx::kEvictFirst);
    ptx::tma_load(to + kPanelBytes, &params_.dout, full, from, ptx::kEvictFirst);
  }

  // What is on its way, and starts the next.
  __device__ __forceinline__ void prepare(Place& place) {
    const Place done = place;
    const float lse = lse_, dlse = dlse_;
    ptx::mbarrier_wait(at(control_.full[warp_]), phase_);
    phase_ ^= 1;
    place = after(place);
    expect(place);
    // Of 16 rows each, the diagonals of O dO^T: of the first 8 in `upper`, of the others in
    // `lower`.
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      __syncwarp();
      multiply(p, upper, lower);
      // Products that have begun have read the panel, which may now be filled again.
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ptx::reg_fence(upper[j]);
        ptx::reg_fence(lower[j]);
      }
      __syncwarp();
      load(place, p);
    }
    const float sum = diagonal(upper, lower);
    const int32_t b = params_.heads_q.quotient(done.head);
    const int32_t h = done.head - b * params_.heads_q.divisor;
    const SeqlenInfo sequence =
        seqlen_info(common_.problem, common_.args.shape, common_.args.inputs, b);
    const int32_t tile_q = common_.tile_q, row = done.row + lane_;
    // Whole tiles are read.
    if (row < (sequence.len.q + tile_q - 1) / tile_q * tile_q) {
      const int64_t first_tile = (int64_t{h} * common_.args.shape.batch + b) * params_.tiles;
      store_lse_delta(common_, sequence, first_tile * tile_q, first_tile, row, lse, dlse, sum);
    }
    const uint32_t far = __ballot_sync(~0u, is_large_lse(lse));
    LseRecompute<T>(common_, sequence, b, h).run(done.row, far, lse);
  }

  __device__ __forceinline__ void multiply(int panel, float (&upper)[2][4],
                                           float (&lower)[2][4]) const {
    // Matrices of 8 x 8: of O rows 0-7, 8-15, then the next 8 columns; of dO both columns of a row.
    const uint32_t o = box_ + panel * 2 * kPanelBytes + lane_ % 16 * 128;
    const uint32_t dout = box_ + (panel * 2 + 1) * kPanelBytes + (lane_ % 8 + lane_ / 16 * 8) * 128;
    const int32_t o_chunk = lane_ / 16, dout_chunk = lane_ / 8 % 2, flip = lane_ % 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        uint32_t x[4], y[4];
        ptx::ldmatrix_x4(x, o + j * (16 * 128) + ((k + o_chunk ^ flip) << 4));
        ptx::ldmatrix_x4(y, dout + j * (16 * 128) + ((k + dout_chunk ^ flip) << 4));
        ptx::mma_16x8x16<T>(upper[j], x, y[0], y[1]);
        ptx::mma_16x8x16<T>(lower[j], x, y[2], y[3]);
      }
    }
  }

  // The number of the lane's row.
  __device__ __forceinline__ float diagonal(const float (&upper)[2][4],
                                            const float (&lower)[2][4]) const {
    // Row r of 8 is that of lane 4 r + r / 2.
    const int32_t from = lane_ % 8 * 4 + lane_ % 8 / 2;
    const bool odd = lane_ / 4 % 2;
    float mine = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = __shfl_sync(~0u, odd ? upper[j][1] : upper[j][0], from);
      const float y = __shfl_sync(~0u, odd ? lower[j][3] : lower[j][2], from);
      if (lane_ / 16 == j) mine = lane_ & 8 ? y : x;
    }
    return mine;
  }

  const PrepareParams& params_;
  const cuda::BackwardParams& common_;
  const int32_t warp_, lane_;
  const uint32_t box_;
  Control<kWarps>& control_;
  uint32_t phase_ = 0;
  float lse_, dlse_;  // of the lane's row of what is on its way
};

template <class T, int kPanels>
__global__ void __launch_bounds__(Preparer<T, kPanels>::kThreads, 1)
    prepare_rows(const __grid_constant__ PrepareParams params) {
  Preparer<T, kPanels>(params).run();
}

template <class T, int kPanels>
constexpr PrepareKernel kernel_of() {
  using Work = Preparer<T, kPanels>;
  return {Work::kThreads, Work::kSharedBytes, &prepare_rows<T, kPanels>};
}

}  // namespace

PrepareKernel prepare_kernel(int32_t dtype, int32_t dim_v) {
  if (dtype == FLASHATTN_DTYPE_F16) {
    return dim_v > 64 ? kernel_of<__half, 2>() : kernel_of<__half, 1>();
  }
  return dim_v > 64 ? kernel_of<__nv_bfloat16, 2>() : kernel_of<__nv_bfloat16, 1>();
}

}  // namespace flashattn::cuda::sm90
