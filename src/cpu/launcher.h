// Runs plans on the CPU.
#pragma once

#include <string>

#include "core/backend.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace flashattn::cpu {

// Cost in multiply-adds of merging an element from memory, or of drawing a random number.
constexpr double kElementCost = 8;

// The threads for work of so many multiply-adds. Work of some 10 us stays on one thread. Sleeping
// threads are woken only for work several times as long, because waking takes that time.
Threads threads_for(int32_t threads, double multiply_adds, const Executor& on);

class CpuLauncher final : public Launcher {
 public:
  explicit CpuLauncher(const Problem& problem);

  int64_t workspace(uint32_t op, const Shape& shape) const override;
  void describe(uint32_t op, const Shape& shape,
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
  struct ForwardWorkspace;
  struct BackwardWorkspace;

  ForwardWorkspace forward_workspace(const Shape& shape, char* base) const;
  BackwardWorkspace backward_workspace(const Shape& shape, char* base) const;
  void merge_splits(const ForwardJob& job, const Executor& on) const;

  const Problem problem_;
  const Kernels& kernels_;
  const int32_t threads_;
  const Tiling forward_tiling_, backward_tiling_;
  const SplitRule split_;
  const int64_t forward_scratch_, backward_scratch_;  // bytes a thread
  int64_t shared_tile_bytes_;  // 0: tiles are not shared, as when workspace_limit has no room
  const std::string forward_name_, backward_name_;
  std::string why_;
};

}  // namespace flashattn::cpu
