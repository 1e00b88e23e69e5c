// Clusters of CTAs quantise blocks of tokens that share a descale, one after the other. A thread
// copies its rows, 8 elements each, to slots in shared memory some steps ahead, across the ends of
// blocks. In the same steps it finds the largest magnitude of a block and writes the block before,
// so that memory is read and written at all times. A block is read once if it fits in the shared
// memory of its cluster. Between blocks the warps of a cluster exchange their maxima; nothing else
// is shared.
#include "core/descale.h"
#include "cuda/kernels/common/quantize_ring.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

using namespace quantize;

// The warps of a cluster exchange their maxima of a block. Each CTA has two sets of them: a warp
// that sends those of block n + 2 has received all of n + 1, whose senders have read those of n.
class Exchange {
 public:
  __device__ __forceinline__ explicit Exchange(int32_t log2_ctas)
      : base_(ptx::shared_address(ptx::dynamic_shared())),
        ctas_(1 << log2_ctas),
        warps_(static_cast<int32_t>(blockDim.x) / 32) {
    if (threadIdx.x == 0) {
      for (int n = 0; n < 2; ++n) ptx::mbarrier_init(barrier(n), ctas_ == 1 ? warps_ : 1);
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
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
    const uint32_t bits =
        static_cast<uint32_t>(__reduce_max_sync(~0u, static_cast<int>(__float_as_uint(x))));
    if (ctas_ == 1) {
      if (lane != 0) return;
      ptx::store_shared(maxima(n) + warp * 4, bits);
      return ptx::mbarrier_arrive(barrier(n));
    }
    const int32_t all = ctas_ * warps_;
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier(n), all * 4);
    if (lane >= ctas_) return;
    const uint32_t own = maxima(n) + (ptx::cluster_rank() * warps_ + warp) * 4;
    ptx::st_async(ptx::mapa(own, lane), bits, ptx::mapa(barrier(n), lane));
  }

  // The largest number of all threads of the cluster for block n.
  __device__ __forceinline__ float receive(int32_t n) const {
    const int32_t all = ctas_ * warps_;
    if (ctas_ == 1) {
      ptx::mbarrier_wait(barrier(n), n >> 1 & 1);
    } else {
      ptx::mbarrier_wait_cluster(barrier(n), n >> 1 & 1);
    }
    int most = 0;
#pragma unroll 1
    for (int32_t each = static_cast<int32_t>(threadIdx.x) % 32; each < all; each += 32) {
      most = max(most, static_cast<int>(ptx::load_shared(maxima(n) + each * 4)));
    }
    return __int_as_float(__reduce_max_sync(~0u, most));
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int32_t n) const { return base_ + (n & 1) * 8; }
  __device__ __forceinline__ uint32_t maxima(int32_t n) const {
    return base_ + kExchangeBarrierBytes + (n & 1) * ctas_ * warps_ * 4;
  }

  const uint32_t base_;
  const int32_t ctas_, warps_;
};

// Rows that are transformed at once: as many as registers allow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kAtOnce = 1;
#else
constexpr int kAtOnce = 2;
#endif

// Where a block lies from its loads to its stores.
enum class Kept {
  kLoaded,       // in the slots of its loads; nothing is transformed
  kTransformed,  // in slots of their own, in fp32
  kSome,         // as many chunks as fit in slots of their own, not transformed; others are loaded
                 // again, from the L2 cache if they are still there
};

template <class T, Kept kKept>
__global__ void __launch_bounds__(kMaxThreads, kKept == Kept::kLoaded ? 2 : 1)
    quantize_stream_kernel(const __grid_constant__ QuantizeParams params) {
  if constexpr (!kHasClusters) return;
  constexpr bool kTransforms = kKept != Kept::kLoaded, kAgain = kKept == Kept::kSome;
  constexpr int kAhead = kAgain ? kAheadChunksOfSome : kAheadChunks;
  using KeptRing = Ring<std::conditional_t<kKept == Kept::kTransformed, float, T>>;
  const QuantizeArgs& args = params.args;
  const QuantizeStream& stream = params.stream;
  Exchange exchange(stream.log2_ctas);
  ptx::griddep_wait();

  const uint32_t first_slot = ptx::shared_address(ptx::dynamic_shared()) + stream.control_bytes;
  const uint32_t ahead_bytes = kAhead * blockDim.x * Ring<T>::kThreadBytes;
  Ring<T> loaded(first_slot, kAhead + (kTransforms ? 0 : stream.kept_chunks));
  KeptRing kept(first_slot + (kTransforms ? ahead_bytes : 0),
                stream.kept_chunks + (kTransforms ? 0 : kAhead));
  KeptRing written = kept;
  Ring<T> loaded_again(
      first_slot + ahead_bytes + stream.kept_chunks * blockDim.x * KeptRing::kThreadBytes, kAhead);
  Ring<T> written_again = loaded_again;
  Loads<T> loads(params, loaded);
  for (int32_t n = 0; n < kAhead; ++n) {
    loads.next_chunk(params);
    ptx::cp_async_commit();
  }

  Transform transform(params, Rows::column(params.operands[1]));
  BlockWalk walk(params);
  BlockTokens block{};
  Rows stores{};
  for (int32_t n = 0;; ++n) {
    // The stores of the block before this one need these.
    float factor = 0;
    const Transform transform_again = transform;
    const bool transforms_again =
        params.operands[block.operand].is_q || params.operands[block.operand].is_k;
    Rows rows_again{};
    if (n > 0) {
      const QuantizeOperand& x = params.operands[block.operand];
      const float descale = descale_of(exchange.receive(n - 1), ptx::kMaxE4m3);
      if (threadIdx.x == 0 && (stream.log2_ctas == 0 || ptx::cluster_rank() == 0)) {
        *reinterpret_cast<float*>(tensor_row(x.descale, 4, block.b, block.kv_head, block.index)) =
            descale;
      }
      factor = 1 / descale;
      if constexpr (kAgain) {
        rows_again.start(x, block, x.in, sizeof(T));
        for (int32_t chunk = 0; chunk < kAhead && !rows_again.ended(); ++chunk) {
          rows_again.next_chunk();
        }
      }
    }
    const bool more = walk.next(params, block);
    const QuantizeOperand& x = params.operands[block.operand];
    const int32_t chunks = more ? Rows::chunks(x, block) : 0;
    const bool shifts = kTransforms && x.is_q && args.lse_shift;
    Rows rows{};
    if (kTransforms && more) {
      transform.start_block(args, x, block.b, block.kv_head);
      const RowLayout layout = row_layout(params.problem, args.shape);
      rows.start(x, block, {args.lse_shift, layout.batch_stride, layout.head_stride, 1}, 4);
    }
    const Ring<T> first = loaded;
    float amax = 0;
    Largest<T> largest;
    for (int32_t chunk = 0; chunk < chunks || !stores.ended(); ++chunk) {
      if (kAgain) ptx::cp_async_wait<kAhead - 1>();
      if (!stores.ended()) {
        const bool again = kAgain && chunk >= stream.kept_chunks;
        constexpr int kRows = kAgain ? kAtOnce : kChunk;
#pragma unroll 1
        for (int first_row = 0; first_row < kChunk; first_row += kRows) {
          float y[kRows][kVector];
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            if (again) {
              written_again.load(first_row + m, y[m]);
            } else {
              written.load(first_row + m, y[m]);
            }
          }
          if constexpr (kAgain) {
            if (transforms_again) transform_again.template apply<true>(y);
          }
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
        stores.next_chunk();
        if (again) {
          written_again.next_chunk();
        } else {
          written.next_chunk();
        }
      }
      if (chunk < chunks) {
        if (!kAgain) ptx::cp_async_wait<kAhead - 1>();
        if constexpr (!kTransforms) {
          largest.add(loaded);
        } else {
          const bool keeps = !kAgain || chunk < stream.kept_chunks;
#pragma unroll 1
          for (int first_row = 0; first_row < kChunk; first_row += kAtOnce) {
            float y[kAtOnce][kVector];
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              const int row = first_row + m;
              if constexpr (kAgain) {
                if (keeps) kept.copy(row, loaded);
              }
              loaded.load(row, y[m]);
              if (!shifts) continue;
              const double product = transform.mean_product(y[m], rows.has(row), 1 << x.log2_lanes);
              if (rows.has(row) && Rows::column(x) == 0) {
                *reinterpret_cast<float*>(rows.at(row)) =
                    static_cast<float>(product * static_cast<double>(params.problem.scale));
              }
            }
            if (x.is_q || x.is_k) transform.template apply<true>(y);
#pragma unroll
            for (int m = 0; m < kAtOnce; ++m) {
              const int row = first_row + m;
              if (rows.has(row)) amax = fmaxf(amax, largest_finite(y[m]));
              if constexpr (!kAgain) kept.store(row, y[m]);
            }
          }
          rows.next_chunk();
          if (keeps) kept.next_chunk();
        }
        loaded.next_chunk();
        loads.next_chunk(params);
      }
      if (kAgain && !rows_again.ended()) {
        if (chunk + kAhead >= stream.kept_chunks) {
          loaded_again.load_async(rows_again);
          loaded_again.next_chunk();
        }
        rows_again.next_chunk();
      }
      ptx::cp_async_commit();
    }
    if (!more) return;
    if constexpr (!kTransforms) {
      amax = largest.get();
      if (!(amax <= FLT_MAX)) {  // infinities do not count
        amax = 0;
        for (Ring<T> again = first; !again.is_at(loaded); again.next_chunk()) {
          for (int row = 0; row < kChunk; ++row) {
            float y[kVector];
            again.load(row, y);
            amax = fmaxf(amax, largest_finite(y));
          }
        }
      }
    }
    exchange.send(n, amax);
    stores.start(x, block, x.out, 1);
  }
}

}  // namespace

QuantizeStreamKernels quantize_stream_kernels(int32_t dtype) {
  return with_type(dtype, [](auto number) {
    using T = decltype(number);
    return QuantizeStreamKernels{&quantize_stream_kernel<T, Kept::kLoaded>,
                                 &quantize_stream_kernel<T, Kept::kTransformed>,
                                 &quantize_stream_kernel<T, Kept::kSome>};
  });
}

}  // namespace flashattn::cuda
