// The rows of the registry that a plan has, and which of them runs a call. Needs no CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/select.h"
#include "cuda/host/kernel_registry.h"

namespace flashattn::cuda {

// The rows that a plan has for one pass, in order of preference. The last takes every call.
template <class Row>
struct PlanRows {
  std::vector<std::unique_ptr<const Row>> rows;
  std::string passed_over;  // why a preferred backend or row was passed over; empty: none was
  size_t own = 0;           // rows that are the backend's own; they come first
  bool forced = false;      // FLASHATTN_BACKEND asks for the cheapest of the backend's own rows

  void make(Registry<Row> registry, const char* backend, const std::string& backend_passed_over,
            const Problem& problem, const Device& device);
  // The cheapest row that supports the shape and accepts args; args NULL: any arrays. *why, unless
  // why is NULL: why this is not the first row; NULL if it is.
  const Row& choose(const Shape& shape, const typename Row::Arguments* args,
                    const char** why = nullptr) const;
  int64_t workspace(const Shape& shape) const;
  std::string why(const Shape& shape, flashattn_plan_properties* properties) const;
  std::string why_of_unknown_shape() const;
};

template <class Row>
void PlanRows<Row>::make(Registry<Row> registry, const char* backend,
                         const std::string& backend_passed_over, const Problem& problem,
                         const Device& device) {
  passed_over = backend_passed_over;
  forced = forced_backend() != nullptr;
  for (size_t n = 0; n < registry.count; ++n) {
    const Registration<Row>& registered = registry.rows[n];
    const auto& of = registered.backends;
    if (std::none_of(std::begin(of), std::end(of),
                     [&](const char* name) { return name && std::strcmp(name, backend) == 0; })) {
      continue;
    }
    const char* why_not = nullptr;
    if (registered.supports(problem, &why_not)) {
      rows.push_back(registered.make(problem, device));
      if (std::strcmp(of[0], backend) == 0) ++own;
    } else if (passed_over.empty()) {
      passed_over = why_not;
    }
  }
  if (problem.workspace_limit == 0) return;
  for (size_t n = 0; n + 1 < rows.size();) {
    if (rows[n]->workspace(maxima_of(problem)) <= problem.workspace_limit) {
      ++n;
      continue;
    }
    passed_over = std::string(rows[n]->title()) + " need more than workspace_limit";
    rows.erase(rows.begin() + static_cast<ptrdiff_t>(n));
    if (n < own) --own;
  }
}

template <class Row>
const Row& PlanRows<Row>::choose(const Shape& shape, const typename Row::Arguments* args,
                                 const char** why) const {
  const Row* best = nullptr;
  RowCost least{};
  const char* against_first = nullptr;  // why the first row costs more, or cannot run the shape
  for (const auto& row : rows) {
    if (forced && best && &row >= &rows[0] + own) break;
    const char* why_not = nullptr;
    const bool supports = row->supports(shape, &why_not) && (!args || row->accepts(*args));
    const RowCost cost = supports ? row->cost(shape) : RowCost{INFINITY, why_not};
    if (row == rows.front()) against_first = cost.why;
    if (!supports || (best && cost.time >= least.time)) continue;
    best = row.get();
    least = cost;
  }
  if (why) {
    *why = best == rows.front().get() ? nullptr : against_first ? against_first : least.why;
  }
  return *best;
}

template <class Row>
int64_t PlanRows<Row>::workspace(const Shape& shape) const {
  int64_t most = 0;
  for (const auto& row : rows) most = std::max(most, row->workspace(shape));
  return most;
}

template <class Row>
std::string PlanRows<Row>::why(const Shape& shape, flashattn_plan_properties* properties) const {
  const char* not_first = nullptr;
  const Row& row = choose(shape, nullptr, &not_first);
  const std::string reason = not_first ? not_first : passed_over;
  const std::string rest = row.describe(shape, properties);
  return row.title() + (reason.empty() ? "" : " (" + reason + ")") + rest;
}

template <class Row>
std::string PlanRows<Row>::why_of_unknown_shape() const {
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : " or ") + std::string(row->title());
  if (!passed_over.empty()) text += " (" + passed_over + ")";
  return text + "; the shape decides, ask with one";
}

}  // namespace flashattn::cuda
