// A row of the registry: kernels for one pass, set up for the problem of a plan.
#pragma once

#include <string>

#include "core/call.h"

struct CUstream_st;  // CUDA's type; cudaStream_t is a pointer to it

namespace flashattn::cuda {

// The time that a row expects a shape to take.
struct RowCost {
  // Relative to the time of the portable kernels with their usual tiles. Rows are compared by it,
  // so that only the order matters; the borders where the order changes are measured.
  double time;
  const char* why;  // why it is not the row's usual time, a few words; NULL: it is
};

// Immutable: any number of threads may call it at once. The launcher runs the cheapest of the rows
// that support a shape.
template <class Args>
class KernelRow {
 public:
  using Arguments = Args;
  virtual ~KernelRow() = default;

  // A few words that begin `why`: "Hopper kernels".
  virtual const char* title() const = 0;

  // Whether the row can run the shape. Sets *why_not, a few words, if it cannot.
  virtual bool supports(const Shape& shape, const char** why_not) const = 0;

  // Whether the row can run a call with these arrays, of a shape that it supports. Plans describe
  // the kernel of calls that the row accepts.
  virtual bool accepts(const Args&) const { return true; }

  // The expected time of a shape that the row supports. The default is for rows that need no model:
  // they are alone, or supports() leaves to other rows what those do faster. Of equal rows the
  // registry's first runs.
  virtual RowCost cost(const Shape&) const { return {1.0, nullptr}; }

  // The workspace in bytes. Never decreases as the shape grows, whether or not the row supports it.
  virtual int64_t workspace(const Shape& shape) const = 0;

  // Fills the properties that describe_kernel() fills, and splits. Returns why the row uses this
  // kernel: the end of plan_info's `why`, after title().
  virtual std::string describe(const Shape& shape, flashattn_plan_properties* properties) const = 0;

  // The device and the plan's context are current. Returns an enum flashattn_status.
  virtual int32_t launch(const Args& args, void* workspace, CUstream_st* stream) const = 0;
};

using ForwardRow = KernelRow<ForwardArgs>;
using BackwardRow = KernelRow<BackwardArgs>;

}  // namespace flashattn::cuda
