// dQ postprocess within the Hopper backward kernel: converts complete dQ tiles to rows of the
// problem's type while they are in L2, as far as there is time. bwd_postprocess.cuh converts the
// rest.
#pragma once

#include "cuda/device/smem_tile.cuh"
#include "cuda/kernels/sm90/bwd_q_tiles.cuh"
#include "cuda/kernels/sm90/dq_convert.cuh"

namespace flashattn::cuda::sm90 {

// Reads whether rows of the heads that are known to be preprocessed may have a softmax base.
template <class Config>
__device__ __forceinline__ void read_large_lse(const BackwardParams& params,
                                               BwdSharedStorage<Config>& storage) {
  const volatile uint64_t& stamp = *params.common.large_lse;
  static_cast<volatile int32_t&>(storage.has_large_lse) = stamp == params.common.large_lse_stamp;
}

// Whether the first `heads` heads, in the order (batch, head), are preprocessed. The scheduler
// calls it: what it starts or publishes from then on is ordered after the preprocessing.
template <class Config>
__device__ __forceinline__ bool is_preprocessed(const BackwardParams& params,
                                                BwdSharedStorage<Config>& storage, int32_t heads) {
  if (!Config::kOverlapPreprocess || !params.preprocess) return true;
  volatile int32_t& known = storage.preprocessed_heads;
  if (known >= heads) return true;
  int32_t least = INT32_MAX;
#pragma unroll
  for (int n = 0; n < kMaxPreprocessTailCtas; n += 4) {
    const int4 words = ptx::load_relaxed(params.preprocess->next_head + n);
    least = min(min(min(words.x, words.y), min(words.z, words.w)), least);
  }
  ptx::fence_gpu();
  ptx::fence_async_proxy_global();
  read_large_lse(params, storage);
  known = least;
  return least >= heads;
}

// Waits until the first heads are preprocessed; before that, is_preprocessed() may see values that
// another launch has left. Without overlap all heads are preprocessed before this kernel starts.
template <class Config>
__device__ __forceinline__ void wait_first_heads(const BackwardParams& params,
                                                 BwdSharedStorage<Config>& storage) {
  if (!Config::kOverlapPreprocess || !params.preprocess) return read_large_lse(params, storage);
  const PreprocessProgress& progress = *params.preprocess;
  while (ptx::load_acquire(&progress.stamp) != params.preprocess_stamp) __nanosleep(50);
  while (ptx::load_acquire(&progress.ctas_done) != params.preprocess_ctas) __nanosleep(50);
}

template <class Config>
__device__ __forceinline__ void wait_preprocessed(const BackwardParams& params,
                                                  BwdSharedStorage<Config>& storage,
                                                  int32_t heads) {
  while (!is_preprocessed(params, storage, heads)) __nanosleep(50);
}

// Looks for complete dQ tiles, in one thread of the CTA. CTAs take dQ tiles from a counter, in the
// order in which they are likely to be complete.
template <class Config>
class DqPostprocessScheduler {
 public:
  __device__ __forceinline__ DqPostprocessScheduler(const BackwardParams& params,
                                                    BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage), tile_(storage.dq_postprocess.tile) {}

  // Takes a dQ tile if none is held, and passes it to the converting threads if it is complete.
  __device__ __forceinline__ void poll() const {
    if (!tile_.valid) {
      if (!pipeline().producer_test({tile_.sent}) || !next_tile()) return;
    }
    if (tile_.rows < 0 || !is_preprocessed(params_, storage_, tile_.heads)) return;
    const int32_t state = ptx::load_acquire(tile_.state);
    if (state >= kDqPendingTile) return;
    if (!(state & kDqClaimed)) tile_.from = nullptr;
    ptx::store_relaxed(tile_.state, kDqConverted);
    producer_commit();
  }

  // Signals that no more tiles come. A tile that is still held is left to the postprocess kernel.
  __device__ __forceinline__ void finish() const {
    pipeline().producer_acquire({tile_.sent});
    tile_.rows = -1;
    producer_commit();
  }

 private:
  __device__ __forceinline__ Pipeline<1>& pipeline() const {
    return storage_.dq_postprocess.pipeline;
  }

  __device__ __forceinline__ void producer_commit() const {
    tile_.valid = 0;
    tile_.sent = tile_.sent + 1;
    pipeline().producer_commit({});
  }

  // Takes the next dQ tile. Returns false if it has no queries.
  __device__ __forceinline__ bool next_tile() const {
    static_assert(kClusterSize<Config> == 1,
                  "inline postprocess needs kTwoCta == false: a CTA holds whole dQ tiles");
    constexpr int kTileQ = Config::kTileQ;
    const cuda::BackwardParams& common = params_.common;
    const int32_t n = atomicAdd(common.dq_work_counter, 1);
    if (n >= params_.q_swizzle.count()) {
      tile_.rows = -1;
    } else {
      const L2Swizzle::Tile at = params_.q_swizzle.tile(n);
      const int32_t b = at.head_idx / common.problem.heads_kv;
      const int32_t kv_head = at.head_idx - b * common.problem.heads_kv;
      const int32_t in_group = at.tile_idx / params_.max_q_tiles;
      const int32_t head = kv_head * common.q_heads_per_kv_head + in_group;
      const int32_t tile = at.tile_idx - in_group * params_.max_q_tiles;
      const SeqlenInfo sequence =
          seqlen_info(common.problem, common.args.shape, common.args.inputs, b);
      if (tile * kTileQ >= sequence.len.q) return false;
      tile_.rows = sequence.len.q - tile * kTileQ;
      tile_.heads = b * common.problem.heads_q + head + 1;
      tile_.to = tensor_row(common.args.dq, 2, b, head, sequence.offset_q + tile * kTileQ);
      const int32_t workspace_tile =
          no_hoist(static_cast<int32_t>(common.query_tile(sequence, b, head, tile, kTileQ)));
      tile_.state = common.dq_states + workspace_tile;
      tile_.from = reinterpret_cast<const float4*>(common.dq) +
                   static_cast<int64_t>(workspace_tile) * (Config::kDqTileBytes / 16);
    }
    tile_.valid = 1;
    return true;
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  volatile DqPostprocessTile& tile_;
};

// Converts dQ tiles, in the dQ warpgroup: each warp converts the 16 rows of each 64 that its own
// accumulators have.
template <class Config>
class DqInlinePostprocess {
  using T = typename Config::T;
  static constexpr uint32_t kNoMoreTiles = ~0u;

 public:
  __device__ __forceinline__ DqInlinePostprocess(const BackwardParams& params,
                                                 BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage) {}

  // Converts the tile that DqPostprocessScheduler has passed, if any.
  __device__ __forceinline__ void poll() const {
    const uint32_t n = tiles_done();
    if (__all_sync(~0u, n != kNoMoreTiles && pipeline().consumer_test({n}))) process();
  }

  // Converts tiles until there are no more.
  __device__ __forceinline__ void finish() const {
    while (tiles_done() != kNoMoreTiles) {
      pipeline().consumer_wait({tiles_done()});
      process();
    }
  }

 private:
  __device__ __forceinline__ Pipeline<1>& pipeline() const {
    return storage_.dq_postprocess.pipeline;
  }

  __device__ __forceinline__ int32_t thread() const { return no_hoist(threadIdx.x) % 128; }
  __device__ __forceinline__ int32_t lane() const { return no_hoist(threadIdx.x) % 32; }

  // Tiles that this warp has converted, or kNoMoreTiles. In shared memory: registers are scarce.
  __device__ __forceinline__ volatile uint32_t& tiles_done() const {
    return storage_.dq_postprocess.tile.done[thread() / 32];
  }

  __device__ __forceinline__ void process() const {
    const volatile DqPostprocessTile& dq_tile = storage_.dq_postprocess.tile;
    const bool valid = dq_tile.rows >= 0;
    if (valid) convert(dq_tile);
    __syncwarp();
    if (lane() == 0) {
      tiles_done() = valid ? tiles_done() + 1 : kNoMoreTiles;
      pipeline().consumer_release({});
    }
    __syncwarp();
  }

  // Converts subtiles of 64 x 64, which follow each other by columns or by queries.
  __device__ __forceinline__ void convert(const volatile DqPostprocessTile& dq_tile) const {
    constexpr int kTileQ = Config::kTileQ;
    constexpr int kHalves = Config::kIsRuntime ? 1 : 2;  // halves at once, 32 columns each
    const float scale = params_.common.problem.scale;
#pragma unroll 1
    for (int32_t n = 0; n < 2 * Config::kDqSubtiles; n += kHalves) {
      const float4* from = dq_tile.from;
      float4 x[4 * kHalves];
#pragma unroll
      for (int i = 0; i < 4 * kHalves; ++i) {
        x[i] = from ? ptx::load_cg(from + n * 512 + i * 128 + thread())
                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      const int32_t row = (kTileQ == 64 ? 0 : n / 2 * 64) + thread() / 32 * 16 + lane() / 4;
      const int32_t column = (kTileQ == 64 ? n : n % 2) * 32;
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        PackedPair<T> upper[4], lower[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const DqQuad<T> quad(x[i * 4 + w], scale);
          upper[w] = quad.upper;
          lower[w] = quad.lower;
        }
        store(dq_tile, row, column + i * 32, upper);
        store(dq_tile, row + 8, column + i * 32, lower);
      }
    }
  }

  // Stores 32 columns of a row of the tile, by a quad of lanes.
  __device__ __forceinline__ void store(const volatile DqPostprocessTile& dq_tile, int32_t row,
                                        int32_t column, const PackedPair<T> (&pairs)[4]) const {
    char* to = dq_tile.to + row * params_.common.args.dq.stride_seq * 2 + column * 2;
    const int32_t columns = row < dq_tile.rows ? params_.common.problem.dim_qk - column : 0;
    store_quad(pairs, to, columns, lane());
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
};

// Converts dQ tiles where there is no dQ warpgroup, in half of the scheduler's warp. Registers are
// few: a tile passes through shared memory in blocks of 64 queries x 32 columns, each as a consumer
// filled a stage of dQ. The threads synchronise by mbarriers alone: the scheduler runs beside them.
template <class Config>
class DqHalfWarpPostprocess {
  using T = typename Config::T;
  static constexpr int kBlockBytes = 64 * 32 * 4;

 public:
  __device__ __forceinline__ DqHalfWarpPostprocess(const BackwardParams& params, uint32_t shared,
                                                   BwdSharedStorage<Config>& storage)
      : params_(params), storage_(storage), shared_(shared) {
    static_assert(Config::kSplitsKPanel && Config::kDqStageBytes == kBlockBytes, "see column_of()");
  }

  // Converts the tiles that DqPostprocessScheduler passes, until there are no more.
  __device__ __forceinline__ void run() const {
    for (PipelineState<1> tiles;; tiles.advance()) {
      while (!storage_.dq_postprocess.pipeline.consumer_test(tiles)) __nanosleep(100);
      if (tile().rows < 0) break;
#pragma unroll 1
      for (int32_t block = 0; block < Config::kDqFills; ++block) {
        const PipelineState<1> at{tiles.count * Config::kDqFills + block};
        load(at, block);
        convert(column_of(block));
        storage_.dq_postprocess.blocks.consumer_release(at);
      }
      storage_.dq_postprocess.pipeline.consumer_release(tiles);
    }
  }

 private:
  __device__ __forceinline__ int32_t thread() const { return no_hoist(threadIdx.x) % kHalfWarp; }
  __device__ __forceinline__ const volatile DqPostprocessTile& tile() const {
    return storage_.dq_postprocess.tile;
  }

  // Loads a block, unless no key was seen.
  __device__ __forceinline__ void load(PipelineState<1> at, int32_t block) const {
    auto& blocks = storage_.dq_postprocess.blocks;
    if (thread() == 0) {
      blocks.producer_acquire(at);
      const float4* from = tile().from;
      if (from) {
        ptx::fence_async_proxy_global();
        blocks.producer_expect(at, kBlockBytes);
        ptx::bulk_load(shared_ + Config::kDqBlock, from + block * (kBlockBytes / 16), kBlockBytes,
                       blocks.full_barrier(at).address());
      } else {
        blocks.producer_commit(at);
      }
    }
    blocks.consumer_wait(at);
  }

  // Converts 16 queries, one per thread, x 8 columns at a time: four pairs, which lie 16 bytes
  // apart. Every two rows begin with another pair, so that no two threads read the same bank.
  __device__ __forceinline__ void convert(int32_t first_column) const {
    const uint32_t seen = tile().from ? ~0u : 0;
#pragma unroll 1
    for (int32_t rows = 0; rows < 64; rows += 16) {
      const int32_t first = thread() / 2 % 4, row = rows + thread();
      const uint32_t from = shared_ + Config::kDqBlock + rows * 32 + thread() % 8 * 64 +
                            thread() / 8 * 8 + first * 16;
      char* to = tile().to + row * params_.common.args.dq.stride_seq * 2 + first_column * 2;
      const int32_t columns = row < tile().rows ? params_.common.problem.dim_qk - first_column : 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = ptx::load_shared_pair((from ^ i * 16) + n * 2048);
          words[i] = convert_dq<T>(x, params_.common.problem.scale).word & seen;  // pair i ^ first
        }
        exchange<1>(words, first & 1);
        exchange<2>(words, first & 2);
        ptx::store_if(n * 8 < columns, to + n * 16, words);
      }
    }
  }

  // Exchanges words i and i ^ kBit, if `exchanges`.
  template <int kBit>
  static __device__ __forceinline__ void exchange(uint32_t (&words)[4], bool exchanges) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & kBit) continue;
      const uint32_t x = words[i], y = words[i | kBit];
      words[i] = exchanges ? y : x;
      words[i | kBit] = exchanges ? x : y;
    }
  }

  // The first column of a block: a consumer has 64 columns of a panel of its own and 32 of panel 1.
  static __device__ __forceinline__ int32_t column_of(int32_t block) {
    const int32_t consumer = block / 3, stage = block - consumer * 3;
    return stage < 2 ? consumer * 128 + stage * 32 : 64 + consumer * 32;
  }

  const BackwardParams& params_;
  BwdSharedStorage<Config>& storage_;
  const uint32_t shared_;
};

}  // namespace flashattn::cuda::sm90
