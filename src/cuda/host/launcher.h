// Runs plans on a GPU with the rows of the registry.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "cuda/host/driver.h"
#include "cuda/host/plan_rows.h"
#include "cuda/host/quantize.h"

namespace flashattn::cuda {

class CudaLauncher final : public Launcher {
 public:
  // backend: the plan's. passed_over: why a preferred backend does not serve; empty: there is none.
  CudaLauncher(const Problem& problem, const Device& device, const char* backend,
               const std::string& passed_over);

  int64_t workspace(uint32_t op, const Shape& shape) const override;
  void describe(uint32_t op, const Shape& shape,
                flashattn_plan_properties* properties) const override;
  // Unknown sizes are replaced by sizes that fill the device.
  void describe_maxima(uint32_t op, const Shape& maxima,
                       flashattn_plan_properties* properties) const override;
  int32_t forward(const ForwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t clear_amax(const ForwardArgs& args, const Executor& on) const override;
  int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t make_block_mask(const BlockMaskArgs& args, const BlockMaskRows& mask, uint8_t* base,
                          const Executor& on) const override;
  int32_t merge(const MergeArgs& args, const Executor& on) const override;
  int32_t quantize(const QuantizeArgs& args, const Executor& on) const override;
  int32_t append_kv(const AppendArgs& args, const Executor& on) const override;
  int32_t dropout_mask(const ForwardArgs& args, uint8_t* keep, const Executor& on) const override;

 private:
  // Returns a copy of the text that lives as long as the launcher.
  const char* keep(std::string text) const;

  const Problem problem_;
  const int32_t device_, multiprocessors_;
  QuantizeLimits quantize_limits_;
  PlanRows<ForwardRow> forward_;
  PlanRows<BackwardRow> backward_;
  std::unique_ptr<const PlanContext> context_;
  mutable std::mutex mutex_;  // guards texts_
  mutable std::set<std::string> texts_;
};

}  // namespace flashattn::cuda
