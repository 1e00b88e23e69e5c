// The registry of GPU kernels: a row for each pass and set of kernels that the host sets up alike.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/host/kernel_row.h"

namespace flashattn::cuda {

template <class Row>
struct Registration {
  const char* backends[3];  // backends whose plans have the row; unused entries are NULL
  // Whether these backends' plans for the problem have the row. If not, because the row cannot
  // compute the problem or is never the cheapest, sets *why_not to a few words.
  bool (*supports)(const Problem& problem, const char** why_not);
  // The device is current. Throws Refused.
  std::unique_ptr<const Row> (*make)(const Problem& problem, const Device& device);
};

template <class Row>
struct Registry {
  const Registration<Row>* rows;  // in order of preference, for shapes for which they cost the same
  size_t count;
};

Registry<ForwardRow> forward_registry();
Registry<BackwardRow> backward_registry();

}  // namespace flashattn::cuda
