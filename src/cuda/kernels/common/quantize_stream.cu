// Clusters of CTAs quantise blocks of tokens that share a descale, one after the other, and read
// each block once. A thread copies its rows to shared memory some steps ahead, across the ends of
// blocks. In the same steps it finds the largest magnitude of a block and writes the block before,
// so that memory is read and written at all times. Rows are 8 elements a thread; no other thread
// accesses its slots. A block fits in the shared memory of its cluster.
#include "core/descale.h"
#include "core/seqlen_info.h"
#include "cuda/kernels/common/quantize_rows.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

using namespace quantize;

// The tokens of a block that this CTA has.
struct BlockTokens {
  int32_t operand, b, kv_head, index;
  int32_t count;
  int64_t first;  // from the start of the array
};

// The blocks of a cluster, in order.
class BlockWalk {
 public:
  __device__ __forceinline__ explicit BlockWalk(const QuantizeParams& params)
      : next_(static_cast<int32_t>(blockIdx.x >> params.stream.log2_ctas)) {}

  // Finds the next block that has tokens. False: there is none.
  __device__ __forceinline__ bool next(const QuantizeParams& params, BlockTokens& block) {
    const QuantizeStream& stream = params.stream;
    const int32_t clusters = static_cast<int32_t>(gridDim.x >> stream.log2_ctas);
    while (next_ < stream.blocks) {
      const int32_t n = next_;
      next_ += clusters;
      block.operand = (n >= params.operands[1].first_block) + (n >= params.operands[2].first_block);
      const QuantizeOperand& x = params.operands[block.operand];
      const int32_t at = n - x.first_block, of_batch = stream.per_kv_head.quotient(at);
      block.kv_head = at - of_batch * stream.per_kv_head.divisor;
      block.b = x.per_block.quotient(of_batch);
      block.index = of_batch - block.b * x.blocks;
      const SeqlenInfo sequence =
          seqlen_info(params.problem, params.args.shape, params.args.inputs, block.b);
      const int32_t skipped = block.index * x.tokens;
      const int32_t tokens =
          min((x.is_q ? sequence.len.q : sequence.len.kv) - skipped, x.tokens);
      if (tokens <= 0) continue;
      const int32_t ctas = 1 << stream.log2_ctas, rank = blockIdx.x & (ctas - 1);
      const int32_t share = (tokens + ctas - 1) >> stream.log2_ctas, begin = share * rank;
      block.count = min(tokens - begin, share);
      block.first = (x.is_q ? sequence.offset_q : sequence.offset_kv) + skipped + begin;
      return true;
    }
    return false;
  }

 private:
  int32_t next_;
};

// The rows of a thread in a CTA's share of a block, kChunk at a time. Neighbouring rows of all
// threads are those of 2^log2_inner heads; a thread visits all tokens before other heads.
class Rows {
 public:
  // size: bytes of an element.
  __device__ __forceinline__ void start(const QuantizeOperand& x, const BlockTokens& block,
                                        const flashattn_tensor& array, int32_t size) {
    const int32_t row = static_cast<int32_t>(threadIdx.x) >> x.log2_lanes;
    const int32_t token = row >> x.log2_inner, head = row - (token << x.log2_inner);
    const int32_t tokens = 1 << x.log2_tokens;
    at_ = tensor_row(array, size, block.b, block.kv_head * x.heads + head, block.first + token) +
          column(x) * size;
    step_ = array.stride_seq * size << x.log2_tokens;
    rows_ = column(x) < x.dim ? (block.count - token + tokens - 1) >> x.log2_tokens : 0;
    left_ = rows_;
    inner_chunks_ = chunks_of_head(x, block);
    inner_ = inner_chunks_;
    outer_ = inner_chunks_ > 0 ? x.heads >> x.log2_inner : 0;
    wrap_ = (array.stride_head * size << x.log2_inner) - inner_chunks_ * kChunk * step_;
  }

  // The chunks of a block.
  static __device__ __forceinline__ int32_t chunks(const QuantizeOperand& x,
                                                   const BlockTokens& block) {
    return chunks_of_head(x, block) * (x.heads >> x.log2_inner);
  }

  // The first column of this thread.
  static __device__ __forceinline__ int32_t column(const QuantizeOperand& x) {
    return (static_cast<int32_t>(threadIdx.x) & ((1 << x.log2_lanes) - 1)) * kVector;
  }

  __device__ __forceinline__ bool ended() const { return outer_ == 0; }

  // Row n of this chunk: whether there is one, and where.
  __device__ __forceinline__ bool has(int32_t n) const { return n < left_; }
  __device__ __forceinline__ char* at(int32_t n) const { return at_ + n * step_; }

  __device__ __forceinline__ void next_chunk() {
    at_ += kChunk * step_;
    left_ -= kChunk;
    if (--inner_ > 0) return;
    inner_ = inner_chunks_;
    left_ = rows_;
    at_ += wrap_;
    --outer_;
  }

 private:
  static __device__ __forceinline__ int32_t chunks_of_head(const QuantizeOperand& x,
                                                           const BlockTokens& block) {
    const int32_t tokens = kChunk << x.log2_tokens;
    return max(block.count + tokens - 1, 0) >> (x.log2_tokens + kLog2Chunk);
  }

  char* at_;
  int64_t step_, wrap_;
  int32_t rows_, left_, inner_, inner_chunks_;
  int32_t outer_ = 0;
};

// Slots for chunks of rows of type T, round and round. A warp's part of a chunk is contiguous:
// rows, parts of 16 bytes, lanes. A thread accesses its own slots only.
template <class T>
class Ring {
 public:
  static constexpr int kParts = kVector * sizeof(T) / 16;
  static constexpr int kThreadBytes = kChunk * kVector * sizeof(T);  // of a chunk

  __device__ __forceinline__ Ring(uint32_t base, int32_t chunks)
      : chunk_bytes_(blockDim.x * kThreadBytes), bytes_(chunks * chunk_bytes_), end_(base + bytes_) {
    const uint32_t lane = threadIdx.x % 32;
    at_ = base + (threadIdx.x - lane) * kThreadBytes + lane * 16;
    end_ += at_ - base;
  }

  __device__ __forceinline__ uint32_t at(int row, int part) const {
    return at_ + (row * kParts + part) * 512;
  }

  __device__ __forceinline__ void next_chunk() {
    at_ += chunk_bytes_;
    if (at_ == end_) at_ -= bytes_;
  }

  __device__ __forceinline__ bool is_at(const Ring& other) const { return at_ == other.at_; }

  __device__ __forceinline__ void load(int row, float (&x)[kVector]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int4 four = ptx::load_shared_16(at(row, part));
      const int32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (sizeof(T) == 4) {
          x[part * 4 + n] = __int_as_float(words[n]);
        } else {
          const float2 two = ptx::unpack<T>(static_cast<uint32_t>(words[n]));
          x[n * 2] = two.x, x[n * 2 + 1] = two.y;
        }
      }
    }
  }

 private:
  uint32_t chunk_bytes_, bytes_, end_, at_;
};

// Copies the rows of a thread to its slots.
template <class T>
class Loads {
 public:
  __device__ __forceinline__ Loads(const QuantizeParams& params, Ring<T> slots)
      : walk_(params), slots_(slots) {}

  // Starts to copy the next chunk, as a cp.async group. A slot without a row becomes 0.
  __device__ __forceinline__ void next_chunk(const QuantizeParams& params) {
    while (has_more_ && rows_.ended()) {
      BlockTokens block;
      has_more_ = walk_.next(params, block);
      if (!has_more_) break;
      const QuantizeOperand& x = params.operands[block.operand];
      rows_.start(x, block, x.in, sizeof(T));
    }
    if (has_more_) {
#pragma unroll
      for (int row = 0; row < kChunk; ++row) {
        const char* const from = rows_.at(row);
#pragma unroll
        for (int part = 0; part < Ring<T>::kParts; ++part) {
          ptx::cp_async_16(slots_.at(row, part), from + part * 16, rows_.has(row));
        }
      }
      rows_.next_chunk();
      slots_.next_chunk();
    }
    ptx::cp_async_commit();
  }

 private:
  BlockWalk walk_;
  Ring<T> slots_;
  Rows rows_{};
  bool has_more_ = true;
};

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

// The largest magnitude of rows as they were loaded.
template <class T>
class Largest {
 public:
  __device__ __forceinline__ void add(const Ring<T>& slots) {
#pragma unroll
    for (int row = 0; row < kChunk; ++row) {
      if constexpr (sizeof(T) == 4) {
        float y[kVector];
        slots.load(row, y);
        most_ = fmaxf(most_, largest_finite(y));
      } else {
        const int4 words = ptx::load_shared_16(slots.at(row, 0));
        pair_ = ptx::max_with_abs<T>(pair_, static_cast<uint32_t>(words.x));
        pair_ = ptx::max_with_abs<T>(pair_, static_cast<uint32_t>(words.y));
        pair_ = ptx::max_with_abs<T>(pair_, static_cast<uint32_t>(words.z));
        pair_ = ptx::max_with_abs<T>(pair_, static_cast<uint32_t>(words.w));
      }
    }
  }

  // The result, or an infinity if there was one.
  __device__ __forceinline__ float get() const {
    if constexpr (sizeof(T) == 4) {
      return most_;
    } else {
      const float2 two = ptx::unpack<T>(pair_);
      return fmaxf(two.x, two.y);
    }
  }

 private:
  float most_ = 0;
  uint32_t pair_ = 0;
};

constexpr int kPair = 2;  // rows that are transformed at once

// kTransforms: rows are transformed to fp32 in slots of their own.
template <class T, bool kTransforms>
__global__ void __launch_bounds__(kMaxThreads, kTransforms ? 1 : 2)
    quantize_stream_kernel(const __grid_constant__ QuantizeParams params) {
  if constexpr (!kHasClusters) return;
  using Kept = std::conditional_t<kTransforms, float, T>;
  const QuantizeArgs& args = params.args;
  const QuantizeStream& stream = params.stream;
  Exchange exchange(stream.log2_ctas);
  ptx::griddep_wait();

  const uint32_t first_slot = ptx::shared_address(ptx::dynamic_shared()) + stream.control_bytes;
  const int32_t slots = kAheadChunks + (kTransforms ? 0 : stream.kept_chunks);
  Ring<T> loaded(first_slot, slots);
  Ring<Kept> kept(first_slot +
                      (kTransforms ? kAheadChunks * blockDim.x * Ring<T>::kThreadBytes : 0),
                  stream.kept_chunks + (kTransforms ? 0 : kAheadChunks));
  Ring<Kept> written = kept;
  Loads<T> loads(params, loaded);
  for (int32_t n = 0; n < kAheadChunks; ++n) loads.next_chunk(params);

  Transform transform(params, Rows::column(params.operands[1]));
  BlockWalk walk(params);
  BlockTokens block{};
  Rows stores{};
  for (int32_t n = 0;; ++n) {
    float factor = 0;  // of the block before this one
    if (n > 0) {
      const float descale = descale_of(exchange.receive(n - 1), ptx::kMaxE4m3);
      if (threadIdx.x == 0 && (stream.log2_ctas == 0 || ptx::cluster_rank() == 0)) {
        const flashattn_tensor& to = params.operands[block.operand].descale;
        *reinterpret_cast<float*>(tensor_row(to, 4, block.b, block.kv_head, block.index)) = descale;
      }
      factor = 1 / descale;
    }
    const bool more = walk.next(params, block);
    const QuantizeOperand& x = params.operands[block.operand];
    int32_t chunks = more ? Rows::chunks(x, block) : 0;
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
    while (chunks > 0 || !stores.ended()) {
      if (!stores.ended()) {
#pragma unroll
        for (int row = 0; row < kChunk; ++row) {
          float y[kVector];
          written.load(row, y);
#pragma unroll
          for (float& each : y) each *= factor;
          ptx::store_if(stores.has(row), reinterpret_cast<float*>(stores.at(row)),
                        __uint_as_float(to_e4m3(y[0], y[1], y[2], y[3])),
                        __uint_as_float(to_e4m3(y[4], y[5], y[6], y[7])));
        }
        stores.next_chunk();
        written.next_chunk();
      }
      if (chunks == 0) continue;
      --chunks;
      ptx::cp_async_wait<kAheadChunks - 1>();
      if constexpr (kTransforms) {
#pragma unroll 1
        for (int first_row = 0; first_row < kChunk; first_row += kPair) {
          float y[kPair][kVector];
#pragma unroll
          for (int n = 0; n < kPair; ++n) {
            const int row = first_row + n;
            loaded.load(row, y[n]);
            if (!shifts) continue;
            const double product = transform.mean_product(y[n], rows.has(row), 1 << x.log2_lanes);
            if (rows.has(row) && Rows::column(x) == 0) {
              *reinterpret_cast<float*>(rows.at(row)) =
                  static_cast<float>(product * static_cast<double>(params.problem.scale));
            }
          }
          if (x.is_q || x.is_k) transform.template apply<true>(y);
#pragma unroll
          for (int n = 0; n < kPair; ++n) {
            const int row = first_row + n;
            if (rows.has(row)) amax = fmaxf(amax, largest_finite(y[n]));
            ptx::store_shared(kept.at(row, 0), y[n][0], y[n][1], y[n][2], y[n][3]);
            ptx::store_shared(kept.at(row, 1), y[n][4], y[n][5], y[n][6], y[n][7]);
          }
        }
        rows.next_chunk();
        kept.next_chunk();
      } else {
        largest.add(loaded);
      }
      loaded.next_chunk();
      loads.next_chunk(params);
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
    return QuantizeStreamKernels{&quantize_stream_kernel<T, false>,
                                 &quantize_stream_kernel<T, true>};
  });
}

}  // namespace flashattn::cuda
