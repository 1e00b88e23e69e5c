// The registry of GPU kernels: a row for each pass and architecture, in order of preference.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/host/kernel_row.h"

namespace flashattn::cuda {

template <class Row>
struct Registration {
  const char* backend;  // a plan of this backend has the row, and those after it up to `last`
  bool last;            // the row takes every shape: a plan has no row after it
  // Why plans for the problem do not have the row, a few words; NULL: they have.
  const char* (*refuses)(const Problem& problem);
  // The device is current. Throws Refused.
  std::unique_ptr<const Row> (*make)(const Problem& problem, const Device& device);
};

template <class Row>
struct Registry {
  const Registration<Row>* rows;
  size_t count;
};

Registry<ForwardRow> forward_registry();
Registry<BackwardRow> backward_registry();

}  // namespace flashattn::cuda
