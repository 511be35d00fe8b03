// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan_cache.h"
#include "planner.h"
#include "tuner.h"

namespace jaxcudnn {

/// A plan that was chosen by measuring, and what is known of it: what a store keeps.
struct Choice {
  std::string plan;
  double microseconds;
  int64_t workspace_size;
  int64_t tried;         ///< plans that were timed
  double milliseconds;   ///< what measuring cost
  std::string source;    ///< "measured" in this process, or "stored" by another
  int64_t reserved = 0;  ///< what `LargestWorkspace` gives; 0 if that is not known
};

/// A choice, and what it was made for.
struct ChoiceRecord {
  std::string key;
  std::string gpu;
  Choice choice;
};

/// The text under which a choice is stored: everything that it depends on, but for the GPU and the
/// version of cuDNN.
[[nodiscard]] std::string ChoiceKey(const Problem& problem);

/// The plan for a request, where that is known without measuring: cuDNN's first, one that is named,
/// or one that was measured or stored before. Null if it has to be measured.
PlanPointer KnownPlan(const PlanRequest& request);

/// The plan for a request, measured if need be and then remembered. Where nothing can be timed, it
/// is cuDNN's first.
PlanPointer GetPlan(const PlanRequest& request, const Bench& bench);

/// Measures although the plan may be known, and remembers it from now on, unless the options name
/// a plan or take cuDNN's first: these stay what they are.
struct MeasuredPlan {
  PlanPointer plan;
  Tuning tuning;
};
MeasuredPlan MeasurePlan(const PlanRequest& request, const Bench& bench);

/// All plans that the options allow, in cuDNN's order.
std::vector<PlanPointer> CandidatesFor(const PlanRequest& request);

/// The most workspace that a plan may need which measuring could choose. It is the same whatever
/// was measured or stored, and known without building plans where a choice is.
int64_t LargestWorkspace(const PlanRequest& request);

/// Takes in a choice that a store has kept.
void RememberChoice(const ChoiceRecord& record);

/// The choices made by measuring since the last call.
std::vector<ChoiceRecord> TakeChoices();

CacheInfo PlanCacheInfo();
/// What the cached plans hold of this process's memory.
int64_t PlanCacheBytes();
void ClearPlanCache();
void SetPlanCacheCapacity(size_t capacity);

}  // namespace jaxcudnn
