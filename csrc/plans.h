// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "plan_cache.h"
#include "planner.h"

namespace jaxcudnn {

/// The plan for `request`, built at the first call of the process and kept.
std::shared_ptr<const Plan> GetPlan(const PlanRequest& request);

CacheInfo PlanCacheInfo();
void ClearPlanCache();
void SetPlanCacheCapacity(size_t capacity);

}  // namespace jaxcudnn
