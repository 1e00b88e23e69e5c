// Runs plans on a GPU with the rows of the registry.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/host/driver.h"
#include "cuda/host/kernel_registry.h"
#include "cuda/kernels/common/quantize.h"

namespace flashattn::cuda {

// The rows that a plan has for one pass, in order of preference. The last takes every call.
template <class Row>
struct PlanRows {
  std::vector<std::unique_ptr<const Row>> rows;
  std::string passed_over;  // why a preferred backend or row does not serve; empty: none is
  size_t own = 0;           // rows that are the backend's own; they come first
  bool forced = false;      // FLASHATTN_BACKEND asks for the cheapest of those

  void make(Registry<Row> registry, const char* backend, const std::string& backend_passed_over,
            const Problem& problem, const Device& device);
  // The cheapest row. args: of a call, NULL: of any. *why, unless NULL: why it is not the first,
  // NULL if it is.
  const Row& choose(const Shape& shape, const typename Row::Arguments* args,
                    const char** why = nullptr) const;
  int64_t workspace(const Shape& shape) const;
  std::string why(const Shape& shape, flashattn_plan_properties* properties) const;
  std::string why_of_unknown_shape() const;
};

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
  int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const override;
  int32_t merge(const MergeArgs& args, const Executor& on) const override;
  int32_t quantize(const QuantizeArgs& args, const Executor& on) const override;
  int32_t append_kv(const AppendArgs& args, const Executor& on) const override;
  int32_t dropout_mask(const ForwardArgs& args, uint8_t* keep, const Executor& on) const override;

 private:
  // The text, kept as long as the launcher lives.
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
