// The interface of a backend: predicates that refuse, and a launcher for what it accepts.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/block_mask_rows.h"
#include "core/problem.h"

namespace flashattn {

// One reason to refuse a problem. The same entry decides, explains and fills the support matrix.
struct Predicate {
  bool (*refuses)(const Problem&, const Device&);
  int32_t reason;     // enum flashattn_reason
  const char* field;  // member of flashattn_desc
  // Writes the message: field, value, limit, remedy. The caller appends the device.
  void (*explain)(const Problem&, const Device&, char* text, size_t capacity);
  bool is_delegated = false;  // a later backend, which this one needs, refuses and gives the reason
};

// Writes the message for a head that is larger than `limit`, the most that a backend takes.
void explain_dim_above(const char* field, int32_t value, int32_t limit, char* text,
                       size_t capacity);

// Runs the kernels of one plan. Immutable: any number of threads may call it at once. Arguments are
// validated and their strides resolved (0 for extents of 1). Only part_o of a merge is the caller's
// own array with strides as given: see resolve_strides() in arrays.h.
class Launcher {
 public:
  virtual ~Launcher() = default;

  // Bytes; never decreases with the shape.
  virtual int64_t workspace(uint32_t op, const Shape& shape) const = 0;

  // Fills tile_q, tile_kv, stages, threads, registers, shared_memory, scratch, splits, kernel, isa
  // and why. The strings live as long as the launcher.
  virtual void describe(uint32_t op, const Shape& shape,
                        flashattn_plan_properties* properties) const = 0;

  // Describes the maxima of a plan, in which 0 means unknown. `why` then says that the choice
  // depends on the shape.
  virtual void describe_maxima(uint32_t op, const Shape& maxima,
                               flashattn_plan_properties* properties) const {
    describe(op, maxima, properties);
  }

  // Each returns an enum flashattn_status. Unless it is OK, the thread's Error is set.
  virtual int32_t forward(const ForwardArgs& args, void* workspace, const Executor& on) const = 0;
  // Writes 0 to amax_o, for a call without queries.
  virtual int32_t clear_amax(const ForwardArgs& args, const Executor& on) const = 0;
  virtual int32_t backward(const BackwardArgs& args, void* workspace, const Executor& on) const = 0;
  // Makes a block mask, see BlockMaskRows, for the forward or backward call that follows.
  virtual int32_t make_block_mask(const BlockMaskArgs& args, const BlockMaskRows& mask,
                                  uint8_t* base, const Executor& on) const = 0;
  virtual int32_t merge(const MergeArgs& args, const Executor& on) const = 0;
  virtual int32_t quantize(const QuantizeArgs& args, const Executor& on) const = 0;
  virtual int32_t append_kv(const AppendArgs& args, const Executor& on) const = 0;
  virtual int32_t dropout_mask(const ForwardArgs& args, uint8_t* keep,
                               const Executor& on) const = 0;
};

struct Backend {
  const char* name;
  int32_t device_kind;  // enum flashattn_device
  const Predicate* predicates;
  size_t predicate_count;
  // passed_over: the message of a preferred backend that refuses; empty: there is none.
  std::unique_ptr<Launcher> (*plan)(const Problem&, const Device&, const std::string& passed_over);
};

struct BackendList {
  const Backend* const* backends;  // in order of preference
  size_t count;
};

// The devices of one kind.
struct DeviceKind {
  int32_t (*count)();
  const Device& (*device)(int32_t index);  // below count(); lives as long as the process
  const char* (*why_none)();               // why count() is 0
};

// The contents of this build, defined in src/registry.cpp, the only file that names backends.
BackendList backends();
const DeviceKind* device_kind(int32_t kind);  // enum flashattn_device; NULL: not in this build
// Writes "CPU: <instruction sets>, CUDA: <architectures>", or ", without CUDA".
void describe_build(char* text, size_t capacity);

}  // namespace flashattn
