// A row of the registry: kernels for one pass, set up for the problem of a plan.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/call.h"

namespace flashattn::cuda {

// Immutable: any number of threads may call it at once. The launcher runs the first row, in order
// of preference, that does not decline a shape. The last row takes every shape.
template <class Args>
class KernelRow {
 public:
  virtual ~KernelRow() = default;

  // A few words that begin `why`: "Hopper kernels".
  virtual const char* title() const = 0;

  // Why the row does not run the shape, a few words; NULL: it does. next: the next row; NULL: none.
  virtual const char* declines(const Shape& shape, const KernelRow* next) const = 0;

  // Whether all CTAs of the shape run at once.
  virtual bool is_one_wave(const Shape&) const { return false; }

  // Bytes; never decreases with the shape, whether or not the row runs it.
  virtual int64_t workspace(const Shape& shape) const = 0;

  // Fills what describe_kernel() fills, and splits. Returns why this kernel of the row: the rest of
  // `why`.
  virtual std::string describe(const Shape& shape, flashattn_plan_properties* properties) const = 0;

  // The device and the plan's context are current. Returns an enum flashattn_status.
  virtual int32_t launch(const Args& args, void* workspace, cudaStream_t stream) const = 0;
};

using ForwardRow = KernelRow<ForwardArgs>;
using BackwardRow = KernelRow<BackwardArgs>;

}  // namespace flashattn::cuda
