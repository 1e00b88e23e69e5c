// Clusters of CTAs quantise blocks of tokens that share a descale, one after the other. A thread
// copies its rows, 8 elements each, to slots in shared memory some steps ahead, across the ends of
// blocks. In the same steps it finds the largest magnitude of a block and writes the block before,
// so that memory is read and written at all times. A block is read once if it fits in the shared
// memory of its cluster. Between blocks the warps of a cluster exchange their maxima; nothing else
// is shared.
#include "core/descale.h"
#include "cuda/kernels/common/quantize_chunk.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

using namespace quantize;

// The CTAs of a cluster exchange their maxima of a block: warps store theirs in the CTA, and its
// first warp sends the largest to all CTAs. There are two sets of each: who sends block n + 2 has
// received n + 1, whose senders have read n.
class Exchange {
 public:
  __device__ __forceinline__ explicit Exchange(int32_t log2_ctas)
      : base_(ptx::shared_address(ptx::dynamic_shared())),
        ctas_(1 << log2_ctas),
        warps_(static_cast<int32_t>(blockDim.x) / 32),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)) {
    if (threadIdx.x == 0) {
      for (int n = 0; n < 2; ++n) {
        ptx::mbarrier_init(warp_barrier(n), warps_);
        ptx::mbarrier_init(cta_barrier(n), 1);
      }
      if (ctas_ > 1) ptx::fence_mbarrier_init();
    }
    if (ctas_ > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // x, not negative: of this thread, for block n.
  __device__ __forceinline__ void send(int32_t n, float x) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int bits = __reduce_max_sync(~0u, __float_as_int(x));
    if (lane == 0) {
      ptx::store_shared(warp_maxima(n) + warp_ * 4, static_cast<uint32_t>(bits));
      ptx::mbarrier_arrive(warp_barrier(n));
    }
    if (ctas_ == 1 || warp_ > 0) return;
    ptx::mbarrier_wait(warp_barrier(n), n >> 1 & 1);
    const uint32_t most = largest(warp_maxima(n), warps_);
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(cta_barrier(n), ctas_ * 4);
    if (lane >= ctas_) return;
    const uint32_t own = cta_maxima(n) + ptx::cluster_rank() * 4;
    ptx::st_async(ptx::mapa(own, lane), most, ptx::mapa(cta_barrier(n), lane));
  }

  // The largest number of all threads of the cluster for block n.
  __device__ __forceinline__ float receive(int32_t n) const {
    if (ctas_ == 1) {
      ptx::mbarrier_wait(warp_barrier(n), n >> 1 & 1);
      return __uint_as_float(largest(warp_maxima(n), warps_));
    }
    ptx::mbarrier_wait_cluster(cta_barrier(n), n >> 1 & 1);
    return __uint_as_float(largest(cta_maxima(n), ctas_));
  }

 private:
  static __device__ __forceinline__ uint32_t largest(uint32_t maxima, int32_t count) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int own = lane < count ? static_cast<int>(ptx::load_shared(maxima + lane * 4)) : 0;
    return static_cast<uint32_t>(__reduce_max_sync(~0u, own));
  }
  __device__ __forceinline__ uint32_t warp_barrier(int32_t n) const { return base_ + (n & 1) * 8; }
  __device__ __forceinline__ uint32_t cta_barrier(int32_t n) const {
    return base_ + 16 + (n & 1) * 8;
  }
  __device__ __forceinline__ uint32_t warp_maxima(int32_t n) const {
    return base_ + kExchangeBarrierBytes + (n & 1) * 4 * warps_;
  }
  __device__ __forceinline__ uint32_t cta_maxima(int32_t n) const {
    return base_ + kExchangeBarrierBytes + 4 * (2 * warps_ + (n & 1) * ctas_);
  }

  const uint32_t base_;
  const int32_t ctas_, warps_, warp_;
};
static_assert(kMaxThreads / 32 <= 32 && kMaxCtas <= 32, "a lane for each maximum");

// Threads of a CTA at most, and rows that are transformed at once: as many as registers allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kStreamThreads = kMaxThreads / 2, kAtOnce = 1;
#else
constexpr int kStreamThreads = kMaxThreads, kAtOnce = 2;
#endif

// Where a block lies, as it was loaded, from its loads to its stores.
enum class Kept {
  kAll,   // in the slots of its loads
  kSome,  // as many chunks as fit in slots of their own; others are loaded again, from the L2 cache
          // if they are still there
};

struct NoTransform {
  __device__ explicit NoTransform(const QuantizeParams&) {}
};

// The work on rows of a block. mean: shared-memory address of the mean of k; 0: the rows need none.
struct Task {
  bool transforms = false, subtracts = false;
  uint32_t mean = 0;
};

template <class T, bool kTransforms, Kept kKept>
__global__ void __launch_bounds__(kKept == Kept::kSome ? kMaxThreadsOfSome : kStreamThreads,
                                  kTransforms ? 1 : 2)
    quantize_stream_kernel(const __grid_constant__ QuantizeParams params) {
  if constexpr (!kHasClusters) return;
  constexpr bool kAgain = kKept == Kept::kSome;
  constexpr bool kByChunks = kTransforms && sizeof(T) == 2, kByRows = kTransforms && !kByChunks;
  const QuantizeArgs& args = params.args;
  const QuantizeStream& stream = params.stream;
  Exchange exchange(stream.log2_ctas);
  ptx::griddep_wait();

  const uint32_t control = ptx::shared_address(ptx::dynamic_shared());
  const uint32_t first_slot = control + stream.control_bytes;
  const int32_t ahead = stream.ahead_chunks;
  const uint32_t ahead_bytes = ahead * blockDim.x * Ring<T>::kThreadBytes;
  Ring<T> loaded(first_slot, ahead + (kAgain ? 0 : stream.kept_chunks));
  Ring<T> kept = loaded;
  if (kAgain) kept = Ring<T>(first_slot + ahead_bytes, stream.kept_chunks);
  Ring<T> written = kept;
  Ring<T> loaded_again(
      first_slot + ahead_bytes + stream.kept_chunks * blockDim.x * Ring<T>::kThreadBytes, ahead);
  Ring<T> written_again = loaded_again;
  Loads<T> loads(params, loaded);
  for (int32_t n = 0; n < ahead; ++n) {
    loads.next_chunk(params);
    ptx::cp_async_commit();
  }

  using Chunks = std::conditional_t<kByChunks, ChunkTransform<T>, NoTransform>;
  const Chunks chunk_transform(params);
  Transform row_transform(params, Rows::column(params.operands[1], threadIdx.x));
  BlockWalk walk(params);
  BlockTokens block{};
  Rows stores{};
  Task task;
  for (int32_t n = 0;; ++n) {
    // The stores of the block before this one need these.
    const Task task_again = task;
    float* descale_at = nullptr;
    Rows rows_again{};
    if (n > 0) {
      const QuantizeOperand& x = params.operands[block.operand];
      if (threadIdx.x == 0 && (stream.log2_ctas == 0 || ptx::cluster_rank() == 0)) {
        descale_at =
            reinterpret_cast<float*>(tensor_row(x.descale, 4, block.b, block.kv_head, block.index));
      }
      if constexpr (kAgain) {
        rows_again.start(x, block, x.in, sizeof(T), threadIdx.x);
        for (int32_t chunk = 0; chunk < ahead && !rows_again.ended(); ++chunk) {
          rows_again.next_chunk();
        }
      }
    }
    const bool more = walk.next(params, block);
    const QuantizeOperand& x = params.operands[block.operand];
    const int32_t chunks = more ? Rows::chunks(x, block) : 0;
    Rows rows{};
    if (kTransforms && more) {
      const bool rotates = args.transform & FLASHATTN_TRANSFORM_ROTATE && (x.is_q || x.is_k);
      task.subtracts = args.k_mean.data && x.is_k;
      task.transforms = rotates || task.subtracts;
      task.mean = 0;
      if (task.subtracts || (x.is_q && args.lse_shift)) {
        // Three tables in turns: this one was last read before block n - 2 was sent, which this
        // warp has received.
        task.mean = control + stream.mean_offset + n % 3 * stream.mean_bytes;
        if (threadIdx.x < 32) {
          const int32_t column = static_cast<int32_t>(threadIdx.x) * kVector;
          float mean[kVector];
          row_transform.load_mean(args, x, block.b, block.kv_head, column, mean);
          if constexpr (kByChunks) {
            chunk_transform.store_mean(args, mean, task.mean);
          } else if (column < kVector << x.log2_lanes) {
            ptx::store_shared(task.mean + column * 4, mean[0], mean[1], mean[2], mean[3]);
            ptx::store_shared(task.mean + column * 4 + 16, mean[4], mean[5], mean[6], mean[7]);
          }
        }
        __syncthreads();
      }
      uint32_t thread = threadIdx.x;
      if constexpr (kByChunks) thread = chunk_transform.thread_of_tile();
      const RowLayout layout = row_layout(params.problem, args.shape);
      rows.start(x, block, {args.lse_shift, layout.batch_stride, layout.head_stride, 1}, 4, thread);
    }
    const bool shifts = kTransforms && x.is_q && task.mean;
    float amax = 0, factor = 0;
    int32_t chunk = 0;
    const auto receive = [&] {
      const float descale = descale_of(exchange.receive(n - 1), ptx::kMaxE4m3);
      if (descale_at) *descale_at = descale;
      factor = 1 / descale;
    };
    // Looks for the largest magnitude in a chunk of this block.
    const auto see_chunk = [&] {
      if (!kAgain && chunk >= chunks) return;
      if (ahead == kAheadChunks) {
        ptx::cp_async_wait<kAheadChunks - 1>();
      } else {
        ptx::cp_async_wait<kFewAheadChunks - 1>();
      }
      if (chunk < chunks) {
        if (!kTransforms || !(task.transforms || shifts)) {
          amax = fmaxf(amax, largest(loaded));
        } else if constexpr (kByChunks) {
          typename Chunks::Tiles y;
          const int32_t segment = static_cast<int32_t>(threadIdx.x) % 4;
          if (task.subtracts) {
            chunk_transform.template multiply<true>(loaded, task.mean, y);
            chunk_transform.clear_absent(rows.has(segment), y);
          } else {
            chunk_transform.template multiply<false>(loaded, 0, y);
          }
          if (shifts) {
            const float product = chunk_transform.mean_product(task.mean, y) * params.problem.scale;
            if (rows.has(segment) && Rows::column(x, chunk_transform.thread_of_tile()) == 0) {
              *reinterpret_cast<float*>(rows.at(segment)) = product;
            }
          }
          if (task.transforms) {
            amax = fmaxf(amax, chunk_transform.largest(y));
          } else {
            amax = fmaxf(amax, largest(loaded));
          }
        } else if constexpr (kByRows) {
          row_transform.use_mean(task.mean, task.subtracts);
#pragma unroll 1
          for (int first_row = 0; first_row < kChunk; first_row += kAtOnce) {
            float y[kAtOnce][kVector];
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              const int row = first_row + m;
              loaded.load(row, y[m]);
              if (!shifts) continue;
              const double product =
                  row_transform.mean_product(y[m], rows.has(row), 1 << x.log2_lanes);
              if (rows.has(row) && Rows::column(x, threadIdx.x) == 0) {
                *reinterpret_cast<float*>(rows.at(row)) =
                    static_cast<float>(product * static_cast<double>(params.problem.scale));
              }
            }
            if (task.transforms) row_transform.template apply<true>(y);
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              if (rows.has(first_row + m)) amax = fmaxf(amax, largest_finite(y[m]));
            }
          }
        }
        if (kTransforms && (task.subtracts || shifts)) rows.next_chunk();
      }
    };
    // Writes a chunk of the block before.
    const auto store_chunk = [&] {
      if (n > 0 && chunk == 0) receive();
      if (!stores.ended()) {
        const bool again = kAgain && chunk >= stream.kept_chunks;
        const Ring<T> from = again ? written_again : written;
        if (kByChunks && task_again.transforms) {
          if constexpr (kByChunks) {
            typename Chunks::Tiles y;
            if (task_again.subtracts) {
              chunk_transform.template multiply<true>(from, task_again.mean, y);
            } else {
              chunk_transform.template multiply<false>(from, 0, y);
            }
            chunk_transform.store(from, factor * chunk_transform.rest(), y);
#pragma unroll
            for (int row = 0; row < kChunk; ++row) {
              const uint2 words = chunk_transform.load(from, row);
              ptx::store_if(stores.has(row), reinterpret_cast<float*>(stores.at(row)),
                            __uint_as_float(words.x), __uint_as_float(words.y));
            }
            __syncwarp();  // before slots are loaded
          }
        } else {
          constexpr int kRows = kByRows ? kAtOnce : kChunk;
          if (kByRows) row_transform.use_mean(task_again.mean, task_again.subtracts);
#pragma unroll 1
          for (int first_row = 0; first_row < kChunk; first_row += kRows) {
            float y[kRows][kVector];
#pragma unroll
            for (int m = 0; m < kRows; ++m) from.load(first_row + m, y[m]);
            if (kByRows && task_again.transforms) row_transform.template apply<true>(y);
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
#pragma unroll
              for (float& each : y[m]) each *= factor;
              ptx::store_if(stores.has(first_row + m),
                            reinterpret_cast<float*>(stores.at(first_row + m)),
                            __uint_as_float(to_e4m3(y[m][0], y[m][1], y[m][2], y[m][3])),
                            __uint_as_float(to_e4m3(y[m][4], y[m][5], y[m][6], y[m][7])));
            }
          }
        }
        stores.next_chunk();
        if (again) {
          written_again.next_chunk();
        } else {
          written.next_chunk();
        }
      }
    };
    for (; chunk < chunks || !stores.ended(); ++chunk) {
      // Tensor cores work while the first chunk's stores wait for other CTAs. Otherwise loads have
      // more time if stores come first.
      if (kTransforms) see_chunk();
      store_chunk();
      if (!kTransforms) see_chunk();
      if (chunk < chunks) {
        if (kAgain && chunk < stream.kept_chunks) {
          kept.copy(loaded);
          kept.next_chunk();
        }
        loaded.next_chunk();
        loads.next_chunk(params);
      }
      if (kAgain && !rows_again.ended()) {
        if (chunk + ahead >= stream.kept_chunks) {
          loaded_again.load_async(rows_again);
          loaded_again.next_chunk();
        }
        rows_again.next_chunk();
      }
      ptx::cp_async_commit();
    }
    if (n > 0 && chunk == 0) receive();  // this CTA has no rows
    if (!more) return;
    if constexpr (kByChunks) {
      if (task.transforms) amax *= chunk_transform.rest();
    }
    exchange.send(n, amax);
    stores.start(x, block, x.out, 1, threadIdx.x);
  }
}

}  // namespace

QuantizeStreamKernels quantize_stream_kernels(int32_t dtype) {
  return with_type(dtype, [](auto number) {
    using T = decltype(number);
    return QuantizeStreamKernels{&quantize_stream_kernel<T, false, Kept::kAll>,
                                 &quantize_stream_kernel<T, true, Kept::kAll>,
                                 &quantize_stream_kernel<T, true, Kept::kSome>};
  });
}

}  // namespace flashattn::cuda
