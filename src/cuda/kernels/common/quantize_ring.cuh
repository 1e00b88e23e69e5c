// A thread of quantize_stream_kernel moves its rows of each block through slots in shared memory:
// the order of blocks, the rows, the slots.
#pragma once

#include "core/seqlen_info.h"
#include "cuda/kernels/common/quantize_rows.cuh"

namespace flashattn::cuda {

using quantize::kChunk, quantize::kLog2Chunk;

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
      int32_t n = next_ + stream.first;
      if (n >= stream.blocks) n -= stream.blocks;
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
      const int32_t tokens = min((x.is_q ? sequence.len.q : sequence.len.kv) - skipped, x.tokens);
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
  // size: bytes of an element; thread: whose rows.
  __device__ __forceinline__ void start(const QuantizeOperand& x, const BlockTokens& block,
                                        const flashattn_tensor& array, int32_t size,
                                        uint32_t thread) {
    const int32_t row = static_cast<int32_t>(thread) >> x.log2_lanes;
    const int32_t token = row >> x.log2_inner, head = row - (token << x.log2_inner);
    const int32_t tokens = 1 << x.log2_tokens;
    at_ = tensor_row(array, size, block.b, block.kv_head * x.heads + head, block.first + token) +
          column(x, thread) * size;
    step_ = array.stride_seq * size << x.log2_tokens;
    rows_ = column(x, thread) < x.dim ? (block.count - token + tokens - 1) >> x.log2_tokens : 0;
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

  // The first column of a thread.
  static __device__ __forceinline__ int32_t column(const QuantizeOperand& x, uint32_t thread) {
    return (static_cast<int32_t>(thread) & ((1 << x.log2_lanes) - 1)) * kVector;
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
      : chunk_bytes_(blockDim.x * kThreadBytes),
        bytes_(chunks * chunk_bytes_),
        end_(base + bytes_) {
    const uint32_t lane = threadIdx.x % 32;
    at_ = base + (threadIdx.x - lane) * kThreadBytes + lane * 16;
    end_ += at_ - base;
    // From the lane itself: ptxas would recompute them at each use, in 15 instructions.
    bytes_ = __shfl_sync(~0u, bytes_, static_cast<int>(lane));
    end_ = __shfl_sync(~0u, end_, static_cast<int>(lane));
  }

  __device__ __forceinline__ uint32_t at(int row, int part) const {
    return at_ + (row * kParts + part) * 512;
  }

  __device__ __forceinline__ void next_chunk() {
    at_ += chunk_bytes_;
    if (at_ == end_) at_ -= bytes_;
  }

  // Copies a chunk of another ring.
  __device__ __forceinline__ void copy(const Ring& from) const {
#pragma unroll
    for (int part = 0; part < kChunk * kParts; ++part) {
      const int4 words = ptx::load_shared_16(from.at(0, part));
      ptx::store_shared_16(at(0, part), words.x, words.y, words.z, words.w);
    }
  }

  // Where the warp's part of the chunk begins.
  __device__ __forceinline__ uint32_t warp_chunk() const { return at_ - threadIdx.x % 32 * 16; }

  // Starts to copy rows of global memory. A slot without a row becomes 0.
  __device__ __forceinline__ void load_async(const Rows& rows) const {
#pragma unroll
    for (int row = 0; row < kChunk; ++row) {
      const char* const from = rows.at(row);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::cp_async_16(at(row, part), from + part * 16, rows.has(row));
      }
    }
  }

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

  __device__ __forceinline__ void next_chunk(const QuantizeParams& params) {
    while (has_more_ && rows_.ended()) {
      BlockTokens block;
      has_more_ = walk_.next(params, block);
      if (!has_more_) break;
      const QuantizeOperand& x = params.operands[block.operand];
      rows_.start(x, block, x.in, sizeof(T), threadIdx.x);
    }
    if (!has_more_) return;
    slots_.load_async(rows_);
    rows_.next_chunk();
    slots_.next_chunk();
  }

 private:
  BlockWalk walk_;
  Ring<T> slots_;
  Rows rows_{};
  bool has_more_ = true;
};

// The largest magnitude of the rows of a chunk, as they were loaded, that is finite; 0: there is
// none.
template <class T>
__device__ __forceinline__ float largest(const Ring<T>& slots) {
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[4] = {};  // independent chains
#pragma unroll
    for (int row = 0; row < kChunk; ++row) {
      const int4 four = ptx::load_shared_16(slots.at(row, 0));
      const int32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        pairs[n] = ptx::max_with_abs<T>(pairs[n], static_cast<uint32_t>(words[n]));
      }
    }
    const float2 two = ptx::unpack<T>(ptx::max_with_abs<T>(
        ptx::max_with_abs<T>(pairs[0], pairs[1]), ptx::max_with_abs<T>(pairs[2], pairs[3])));
    const float most = fmaxf(two.x, two.y);
    if (most <= FLT_MAX) return most;
  }
  float most = 0;
#pragma unroll(sizeof(T) == 2 ? 1 : kChunk)
  for (int row = 0; row < kChunk; ++row) {
    float y[kVector];
    slots.load(row, y);
    most = fmaxf(most, largest_finite(y));
  }
  return most;
}

}  // namespace flashattn::cuda
