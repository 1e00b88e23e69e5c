// A cluster of CTAs quantises a block of tokens that share a descale: it reads the block once into
// shared memory, finds the largest magnitude, and writes the block. Rows that do not fit in the
// cluster's shared memory are read twice.
#include "cuda/kernels/common/quantize.h"

#include "core/descale.h"
#include "core/seqlen_info.h"
#include "cuda/kernels/common/quantize_rows.cuh"
#include "cuda/kernels/common/with_type.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"

namespace flashattn::cuda {
namespace {

using namespace quantize;

// Lies before the rows in shared memory.
struct Control {
  uint64_t barrier;  // counts the bytes of cta_amax
  float warp_amax[kMaxThreads / 32];
  float cta_amax[kMaxCtas];  // maxima of the CTAs that share a block
};
static_assert(sizeof(Control) <= kControlBytes, "rows are aligned");

// The largest of the numbers of all threads of the CTAs that share a block; not below 0.
__device__ __forceinline__ float largest(float x, Control* control, int32_t ctas, uint32_t rank) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (lane == 0) control->warp_amax[warp] = x;
  __syncthreads();
  for (uint32_t n = 0; n < blockDim.x / 32; ++n) x = fmaxf(x, control->warp_amax[n]);
  if (!kHasClusters || ctas == 1) return x;
  const uint32_t barrier = ptx::shared_address(&control->barrier);
  ptx::cluster_wait();  // barriers of the others are initialised
  if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(barrier, ctas * sizeof(float));
  if (threadIdx.x < static_cast<uint32_t>(ctas)) {
    const uint32_t to = ptx::cluster_rank() - rank + threadIdx.x;
    ptx::st_async(ptx::mapa(ptx::shared_address(&control->cta_amax[rank]), to), __float_as_uint(x),
                  ptx::mapa(barrier, to));
  }
  // Once all numbers have arrived, no other CTA accesses this CTA's memory any more.
  ptx::mbarrier_wait_cluster(barrier, 0);
  for (int32_t n = 0; n < ctas; ++n) x = fmaxf(x, control->cta_amax[n]);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams params) {
  ptx::griddep_wait();
  const Problem& problem = params.problem;
  const QuantizeArgs& args = params.args;
  const QuantizeOperand& x = operand_of_cta(params.operands);
  const uint32_t cta = blockIdx.x - x.first_cta, index = cta >> x.log2_ctas;
  const int32_t ctas = 1 << x.log2_ctas, lanes = 1 << x.log2_lanes;
  const uint32_t rank = cta & (ctas - 1);
  const uint32_t block_of_batch = index / problem.heads_kv;
  const int32_t kv_head = index - block_of_batch * problem.heads_kv;
  const int32_t b = block_of_batch / x.blocks, block = block_of_batch - b * x.blocks;
  if (b >= args.shape.batch) return;  // this CTA only fills the last cluster
  const SeqlenInfo sequence = seqlen_info(problem, args.shape, args.inputs, b);
  const int32_t length = x.is_q ? sequence.len.q : sequence.len.kv;
  const int64_t offset = x.is_q ? sequence.offset_q : sequence.offset_kv;
  const int64_t first = static_cast<int64_t>(block) * x.tokens;
  if (first >= length) return;

  Control* const control = reinterpret_cast<Control*>(ptx::dynamic_shared());
  if (kHasClusters && ctas > 1) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&control->barrier), 1);
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive_relaxed();
  }
  const int64_t rows = min(static_cast<int64_t>(x.tokens), length - first) * x.heads;
  const int64_t share_rows = ceil_div(rows, ctas), begin = min(rank * share_rows, rows);
  const int32_t own = static_cast<int32_t>(threadIdx.x) >> x.log2_lanes;
  const int64_t own_token = (begin + own) / x.heads;
  const int32_t own_head = static_cast<int32_t>(begin + own - own_token * x.heads);
  const int64_t token = offset + first + own_token;
  const int32_t count_rows = static_cast<int32_t>(min(share_rows, rows - begin));
  const int32_t row_step = static_cast<int32_t>(blockDim.x) >> x.log2_lanes;
  const int32_t passes = static_cast<int32_t>(ceil_div(count_rows, row_step));
  const int32_t column = (static_cast<int32_t>(threadIdx.x) & (lanes - 1)) * kVector;
  const int32_t count = x.dim - column;  // columns left from there on
  Transform transform(params, column);
  transform.start_block(args, x, b, kv_head);
  const char* const in = tensor_row(x.in, sizeof(T), b, kv_head * x.heads, 0) + column * sizeof(T);
  const int64_t in_seq = x.in.stride_seq * sizeof(T), in_head = x.in.stride_head * sizeof(T);

  // The CTA's rows from this thread's first one on; 0: the thread has no columns.
  const int32_t own_left = count > 0 ? count_rows - own : 0;

  // Row n of a thread lies in slot n. Rows that do not stay resident share the last kAhead
  // slots.
  const int32_t resident = passes <= params.slots ? passes : params.slots - kAhead;
  const uint32_t own_slot = kControlBytes + threadIdx.x * kVector * sizeof(T);
  const uint32_t slot_bytes = blockDim.x * kVector * sizeof(T);
  const SlotWalk first_slot{own_slot, slot_bytes, own_slot + params.slots * slot_bytes,
                            kAhead * slot_bytes};
  struct Loads {
    RowWalk row;
    SlotWalk slot;
    int32_t left;
  };
  // A cp.async group for each row, so that waits count rows. Without a row the slot keeps its
  // content.
  const auto load_ahead = [&](Loads& loads) {
    if (loads.left > 0) {
      const uint32_t to = ptx::shared_address(ptx::dynamic_shared()) + loads.slot.at;
#pragma unroll
      for (int at = 0; at < static_cast<int>(kVector * sizeof(T)); at += 16) {
        ptx::cp_async_16(to + at, loads.row.at + at, true);
      }
    }
    loads.left -= row_step;
    loads.row.next();
    loads.slot.next();
    ptx::cp_async_commit();
  };
  // Loads a row from its slot, or from memory where vectors cannot be copied.
  const auto load = [&](SlotWalk& slot, Loads& loads, float (&y)[kVector]) {
    if (x.vectors) {
      load_columns<T, true>(reinterpret_cast<const T*>(ptx::dynamic_shared() + slot.at), kVector,
                            y);
      return slot.next();
    }
    load_columns<T, false>(reinterpret_cast<const T*>(loads.row.at), loads.left > 0 ? count : 0, y);
    loads.left -= row_step;
    loads.row.next();
  };
  const bool transforms = x.is_q || x.is_k, shifts = x.is_q && args.lse_shift;
  const bool is_f8 = x.dtype_out == FLASHATTN_DTYPE_F8E4M3;

  const Loads first_loads{RowWalk(x, in, token, own_head, in_seq, in_head), first_slot, own_left};
  float amax = 0;
  if (is_f8 || shifts) {
    const RowLayout layout = row_layout(problem, args.shape);
    const int64_t shift_head =
        b * layout.batch_stride + static_cast<int64_t>(kv_head) * x.heads * layout.head_stride;
    RowWalk shift(x, reinterpret_cast<const char*>(args.lse_shift) + shift_head * 4, token,
                  own_head, 4, layout.head_stride * 4);
    Loads loads = first_loads;
    SlotWalk slot = first_slot;
    if (x.vectors) {
      for (int32_t n = 0; n < kAhead; ++n) load_ahead(loads);
    }
    int32_t left = own_left;
    for (int32_t n = 0; n < passes; ++n, left -= row_step) {
      if (x.vectors) ptx::cp_async_wait<kAhead - 1>();
      float row[1][kVector];
      auto& y = row[0];
      load(slot, loads, y);
      if (shifts) {
        const double product = transform.mean_product(y, left > 0, lanes);
        if (column == 0 && left > 0) {
          *reinterpret_cast<float*>(const_cast<char*>(shift.at)) =
              static_cast<float>(product * static_cast<double>(problem.scale));
        }
        shift.next();
      }
      if (transforms) transform.apply<false>(row);
      if (left > 0) amax = fmaxf(amax, largest_finite(y));
      if (x.vectors) load_ahead(loads);
    }
  }
  if (!x.out.data) return;
  // Rows from here on were not kept in shared memory, or not loaded yet.
  const int32_t again = is_f8 || shifts ? resident : 0;
  Loads loads = first_loads;
  if (x.vectors && again < passes) {
    for (int32_t n = 0; n < again; ++n) {
      loads.left -= row_step;
      loads.row.next();
      loads.slot.next();
    }
    for (int32_t n = 0; n < kAhead; ++n) load_ahead(loads);
  }
  float factor = 1;
  if (is_f8) {
    amax = largest(amax, control, ctas, rank);
    const float descale = descale_of(amax, ptx::kMaxE4m3);
    if (rank == 0 && threadIdx.x == 0) {
      *reinterpret_cast<float*>(tensor_row(x.descale, 4, b, kv_head, block)) = descale;
    }
    factor = 1 / descale;
  }
  const int32_t size_out = dtype_size(x.dtype_out);
  RowWalk to(x, tensor_row(x.out, size_out, b, kv_head * x.heads, 0) + column * size_out, token,
             own_head, x.out.stride_seq * size_out, x.out.stride_head * size_out);
  SlotWalk slot = first_slot;
  int32_t left = own_left;
  for (int32_t n = 0; n < passes; ++n, left -= row_step, to.next()) {
    if (x.vectors && n >= again) ptx::cp_async_wait<kAhead - 1>();
    float row[1][kVector];
    auto& y = row[0];
    load(slot, loads, y);
    if (transforms) transform.apply<false>(row);
    if (left > 0) {
#pragma unroll
      for (float& each : y) each *= factor;
      char* const out = const_cast<char*>(to.at);
      switch (x.dtype_out) {
        case FLASHATTN_DTYPE_F8E4M3: store_columns<ptx::E4m3>(out, count, x.vectors, y); break;
        case FLASHATTN_DTYPE_F16: store_columns<__half>(out, count, x.vectors, y); break;
        case FLASHATTN_DTYPE_BF16: store_columns<__nv_bfloat16>(out, count, x.vectors, y); break;
        default: store_columns<float>(out, count, x.vectors, y);
      }
    }
    if (x.vectors && n >= again) load_ahead(loads);
  }
}

}  // namespace

QuantizeKernel quantize_any_kernel(int32_t dtype) {
  return with_type(
      dtype, [](auto number) -> QuantizeKernel { return &quantize_kernel<decltype(number)>; });
}

}  // namespace flashattn::cuda
