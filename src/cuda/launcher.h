// Runs plans on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/family.h"
#include "cuda/params.h"
#include "cuda/sm80/table.h"

namespace flashattn::cuda {

// Records a failure of the runtime; OK for cudaSuccess.
int32_t status_of(cudaError_t error, const char* what);

// As cudaError_t says; other than OK ends the making of a plan.
void throw_on(cudaError_t error, const char* what);

// Restores the caller's current device.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device);
  ~DeviceScope();

 private:
  int before_ = 0;
};

class Sm80Launcher : public Launcher {
 public:
  // The kernels that the plan may choose from by the shape of a call.
  struct Choice {
    const sm80::ForwardEntry* entry;
    int32_t registers;
    int32_t resident;  // blocks at once on the whole device
  };

  Sm80Launcher(const Problem& problem, const Device& device);

  int64_t workspace(uint32_t op, const flashattn_shape& shape) const override;
  void describe(uint32_t op, const flashattn_shape& shape,
                flashattn_plan_properties* properties) const override;
  int32_t forward(const flashattn_forward_args& args, void* workspace, void* stream) const override;
  int32_t backward(const flashattn_backward_args& args, void* workspace,
                   void* stream) const override;
  int32_t merge(const flashattn_merge_args& args, void* stream) const override;
  int32_t dropout_mask(const flashattn_forward_args& args, uint8_t* keep,
                       void* stream) const override;

 protected:
  // OK when the device is the current one.
  int32_t check_device() const;
  int32_t check_alignment(const flashattn_forward_args& args) const;

  const Problem problem_;
  const int32_t device_, units_;
  const int64_t l2_bytes_;

 private:
  // Everything but the arguments and the workspace.
  ForwardParams grid(const flashattn_shape& shape) const;
  const Choice& choose(const flashattn_shape& shape) const;

  Choice large_, small_;  // more rows a warp where queries are many
  std::string large_name_, small_name_;
};

}  // namespace flashattn::cuda
