// Preprocess kernel of the Hopper backward pass that overlaps the backward kernel: computes lse2,
// delta and the counters of dQ head by head, so that the backward kernel can start with the first
// heads. It takes little of the multiprocessors' time: TMA loads boxes of O and dO, as many as
// shared memory holds, and tensor cores compute the rows' dot products, as the diagonal of O dO^T.
// All CTAs preprocess the first heads and then let the backward kernel start; a few CTAs stay for
// the other heads. On an H200 this hides 25 of 38 us.
#include "cuda/kernels/sm90/bwd_preprocess.h"

#include "cuda/kernels/common/lse_recompute.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace flashattn::cuda::sm90 {
namespace {

constexpr int kHeadStages = 8;               // heads that a warp may be ahead of others
constexpr int kPanelBytes = kBoxRows * 128;  // 64 columns of a box

using HeadState = PipelineState<kHeadStages>;

template <int kWarps>
struct SharedStorage {
  Barrier full[kWarps];  // a warp's box
  // All warps are done with a head; the last warp waits for it.
  StageBarriers<kHeadStages> heads_done;
};

// Heads of kPanels * 64 columns. Each warp but the last processes a box of O and of dO at a time;
// the last publishes the progress of all.
template <class T, int kPanels>
class BwdPreprocess {
  static constexpr int kBoxBytes = 2 * kPanels * kPanelBytes;
  // As many boxes as shared memory holds.
  static constexpr int kWarps = kPanels == 1 ? 23 : 28 / kPanels;

 public:
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kSharedBytes =
      kWarps * kBoxBytes + static_cast<int>(sizeof(SharedStorage<kWarps>));

  __device__ __forceinline__ explicit BwdPreprocess(const BwdPreprocessParams& params)
      : params_(params),
        common_(params.common),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        smem_(ptx::shared_address(ptx::dynamic_shared()) + warp_ * kBoxBytes),
        storage_(*reinterpret_cast<SharedStorage<kWarps>*>(ptx::dynamic_shared() +
                                                           kWarps * kBoxBytes)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (Barrier& full : storage_.full) full.init(1);
      storage_.heads_done.init(kWarps + 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddep_wait();
    if (blockIdx.x == 0) reset_counters();
    if (threadIdx.x < kMaxPreprocessTailCtas) reset_next_head(threadIdx.x);
    Box box{};
    if (warp_ < kWarps) {
      box = first_heads_box(blockIdx.x + gridDim.x * warp_);
      start_box(box);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) load_panel(box, p);
    } else {
      box.tail = true;  // this warp has no boxes
      if (lane_ == 0) wait_for_reset();
    }
    bool in_first_heads = true;
    int32_t heads_done = 0;
    for (;;) {
      if (in_first_heads && box.tail) {
        if (!finish_first_heads()) return;
        in_first_heads = false;
      }
      if (box.tail) {
        signal_heads_before(heads_done, box);
        if (box.head >= params_.heads) return;
      }
      process_box(box);
    }
  }

 private:
  // A box of a head. index: its position among the boxes of the first heads, which all CTAs share,
  // or, if `tail`, among those of this CTA's own heads.
  struct Box {
    bool tail;
    int32_t index, head, row;
  };

  // The n-th of this CTA's own heads.
  __device__ __forceinline__ int32_t tail_head(int32_t n) const {
    return params_.first_heads + n * params_.tail_ctas + blockIdx.x;
  }

  __device__ __forceinline__ Box tail_box(int32_t index) const {
    const int32_t n = params_.head_boxes.quotient(index);
    const bool has_head = static_cast<int32_t>(blockIdx.x) < params_.tail_ctas;
    return {true, index, has_head ? tail_head(n) : params_.heads,
            (index - n * params_.head_boxes.divisor) * kBoxRows};
  }

  __device__ __forceinline__ Box first_heads_box(int32_t index) const {
    const int32_t head = params_.head_boxes.quotient(index);
    if (head >= params_.first_heads) return tail_box(warp_);
    return {false, index, head, (index - head * params_.head_boxes.divisor) * kBoxRows};
  }

  __device__ __forceinline__ Box next_box(const Box& box) const {
    return box.tail ? tail_box(box.index + kWarps)
                    : first_heads_box(box.index + kWarps * static_cast<int32_t>(gridDim.x));
  }

  // CTA 0 clears the counters of dQ, then publishes the launch's stamp.
  __device__ __forceinline__ void reset_counters() const {
    clear_counters(common_, kThreads, 0);
    if (threadIdx.x != 0) return;
    params_.progress->ctas_done = 0;
    ptx::store_release(&params_.progress->stamp, params_.stamp);
  }

  __device__ __forceinline__ void wait_for_reset() const {
    while (ptx::load_acquire(&params_.progress->stamp) != params_.stamp) __nanosleep(100);
  }

  // Waits until the CTA is done with its part of the first heads, and lets the backward kernel
  // start. Returns whether this warp has boxes left.
  __device__ __forceinline__ bool finish_first_heads() const {
    __syncthreads();
    ptx::griddep_launch_dependents();
    const bool publishes = warp_ == kWarps && lane_ == 0;
    if (publishes) ptx::red_add_release(&params_.progress->ctas_done, 1);
    if (static_cast<int32_t>(blockIdx.x) >= params_.tail_ctas) return false;
    if (publishes) publish_progress();
    return warp_ < kWarps;
  }

  // Resets next_head[n]: each CTA its own word, CTA 0 also the words that belong to no CTA.
  __device__ __forceinline__ void reset_next_head(int32_t n) const {
    const bool has_head = n < params_.tail_ctas && params_.first_heads + n < params_.heads;
    if (static_cast<int32_t>(blockIdx.x) == (n < params_.tail_ctas ? n : 0)) {
      params_.progress->next_head[n] = has_head ? params_.first_heads + n : INT32_MAX;
    }
  }

  // Signals that this warp is done with the heads before `box`.
  __device__ __forceinline__ void signal_heads_before(int32_t& heads_done, const Box& box) const {
    for (; tail_head(heads_done) < min(box.head, params_.heads); ++heads_done) {
      __syncwarp();
      if (lane_ != 0) continue;
      const HeadState at{static_cast<uint32_t>(heads_done)};
      storage_.heads_done.wait_before(at);
      storage_.heads_done.arrive(at);
    }
  }

  // Publishes the heads that all warps have passed, unless they have passed more meanwhile: a
  // release takes long while so many loads are in flight.
  __device__ __forceinline__ void publish_progress() const {
    int32_t* const word = params_.progress->next_head + blockIdx.x;
    for (int32_t n = 0; tail_head(n) < params_.heads; ++n) {
      const HeadState at{static_cast<uint32_t>(n)};
      storage_.heads_done.arrive(at);
      if (storage_.heads_done.at(at).test(at.phase())) continue;
      ptx::store_release(word, tail_head(n));
      storage_.heads_done.wait(at);
    }
    ptx::store_release(word, INT32_MAX);
  }

  // Expects the bytes of a box of O and dO, and loads lse and dlse of the lane's row.
  __device__ __forceinline__ void start_box(const Box& box) {
    lse_ = -INFINITY;
    dlse_ = 0.0f;
    if (box.head >= params_.heads) return;
    if (lane_ == 0) storage_.full[warp_].expect(kBoxBytes);
    const int32_t b = params_.heads_q.quotient(box.head);
    const int32_t h = box.head - b * params_.heads_q.divisor, row = box.row + lane_;
    const SeqlenInfo sequence =
        seqlen_info(common_.problem, common_.args.shape, common_.args.inputs, b);
    if (row >= sequence.len.q) return;
    const int64_t row_idx = common_.row(b, h, row);
    lse_ = common_.args.lse[row_idx];
    if (common_.args.dlse) dlse_ = common_.args.dlse[row_idx];
  }

  __device__ __forceinline__ void load_panel(const Box& box, int panel) const {
    if (box.head >= params_.heads || !ptx::elect()) return;
    const int32_t b = params_.heads_q.quotient(box.head);
    const ptx::TmaCoord from{panel * 64, box.row, box.head - b * params_.heads_q.divisor, b};
    const uint32_t full = storage_.full[warp_].address(), to = smem_ + panel * 2 * kPanelBytes;
    ptx::tma_load(to, &params_.o, full, from, ptx::kEvictFirst);
    ptx::tma_load(to + kPanelBytes, &params_.dout, full, from, ptx::kEvictFirst);
  }

  // Processes the box in flight, and starts the next.
  __device__ __forceinline__ void process_box(Box& box) {
    const Box done = box;
    const float lse = lse_, dlse = dlse_;
    storage_.full[warp_].wait(phase_);
    phase_ ^= 1;
    box = next_box(box);
    start_box(box);
    // Diagonals of O dO^T for two blocks of 16 rows: rows 0-7 of a block in `upper`, 8-15 in
    // `lower`.
    float upper[2][4] = {}, lower[2][4] = {};
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      __syncwarp();
      mma_diagonals(p, upper, lower);
      // The MMAs that were issued have read the panel, which may now be filled again.
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ptx::reg_fence(upper[j]);
        ptx::reg_fence(lower[j]);
      }
      __syncwarp();
      load_panel(box, p);
    }
    const float dot = row_dot(upper, lower);
    const int32_t b = params_.heads_q.quotient(done.head);
    const int32_t h = done.head - b * params_.heads_q.divisor;
    const SeqlenInfo sequence =
        seqlen_info(common_.problem, common_.args.shape, common_.args.inputs, b);
    const int32_t tile_q = common_.tile_q, row = done.row + lane_;
    // The backward kernel reads whole Q tiles.
    if (row < (sequence.len.q + tile_q - 1) / tile_q * tile_q) {
      const int64_t workspace_tile =
          (int64_t{h} * common_.args.shape.batch + b) * params_.max_q_tiles;
      store_lse_delta<T>(common_, sequence, workspace_tile * tile_q, workspace_tile, row, lse, dlse,
                         dot);
    }
    const uint32_t large_lse = __ballot_sync(~0u, is_large_lse(lse));
    if (large_lse == 0) return;
    // no_hoist keeps the compiler from computing its operands ahead of the branch.
    LseRecompute<T>(common_, sequence, no_hoist(b), no_hoist(h)).run(done.row, large_lse, lse);
  }

  __device__ __forceinline__ void mma_diagonals(int panel, float (&upper)[2][4],
                                                float (&lower)[2][4]) const {
    // 8 x 8 matrices. O: rows 0-7, rows 8-15, then the next 8 columns. dO: both columns of rows
    // 0-7, then of rows 8-15.
    const uint32_t o = smem_ + panel * 2 * kPanelBytes + lane_ % 16 * 128;
    const uint32_t dout =
        smem_ + (panel * 2 + 1) * kPanelBytes + (lane_ % 8 + lane_ / 16 * 8) * 128;
    const int32_t o_chunk = lane_ / 16, dout_chunk = lane_ / 8 % 2, swizzle = lane_ % 8;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        uint32_t x[4], y[4];
        ptx::ldmatrix_x4(x, o + j * (16 * 128) + ((k + o_chunk ^ swizzle) << 4));
        ptx::ldmatrix_x4(y, dout + j * (16 * 128) + ((k + dout_chunk ^ swizzle) << 4));
        ptx::mma_16x8x16<T>(upper[j], x, y[0], y[1]);
        ptx::mma_16x8x16<T>(lower[j], x, y[2], y[3]);
      }
    }
  }

  // The dot product of the lane's row.
  __device__ __forceinline__ float row_dot(const float (&upper)[2][4],
                                           const float (&lower)[2][4]) const {
    // Lane 4 r + r / 2 holds diagonal element r of 8.
    const int32_t from = lane_ % 8 * 4 + lane_ % 8 / 2;
    const bool odd = lane_ / 4 % 2;
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float x = __shfl_sync(~0u, odd ? upper[j][1] : upper[j][0], from);
      const float y = __shfl_sync(~0u, odd ? lower[j][3] : lower[j][2], from);
      if (lane_ / 16 == j) dot = lane_ & 8 ? y : x;
    }
    return dot;
  }

  const BwdPreprocessParams& params_;
  const cuda::BackwardParams& common_;
  const int32_t warp_, lane_;
  const uint32_t smem_;
  SharedStorage<kWarps>& storage_;
  uint32_t phase_ = 0;
  float lse_, dlse_;  // for the lane's row of the box in flight
};

template <class T, int kPanels>
__global__ void __launch_bounds__(BwdPreprocess<T, kPanels>::kThreads, 1)
    bwd_preprocess_rows(const __grid_constant__ BwdPreprocessParams params) {
  BwdPreprocess<T, kPanels>(params).run();
}

template <class T, int kPanels>
constexpr BwdPreprocessKernel instance() {
  using Kernel = BwdPreprocess<T, kPanels>;
  return {Kernel::kThreads, Kernel::kSharedBytes, &bwd_preprocess_rows<T, kPanels>};
}

template <class T>
BwdPreprocessKernel instance(int32_t dim_v) {
  if (dim_v <= 64) return instance<T, 1>();
  if (dim_v <= 128) return instance<T, 2>();
  return dim_v <= 192 ? instance<T, 3>() : instance<T, 4>();
}

}  // namespace

BwdPreprocessKernel bwd_preprocess_kernel(int32_t dtype, int32_t dim_v) {
  return dtype == FLASHATTN_DTYPE_F16 ? instance<__half>(dim_v) : instance<__nv_bfloat16>(dim_v);
}

}  // namespace flashattn::cuda::sm90
