// SPDX-License-Identifier: Apache-2.0
#include "plans.h"

namespace jaxcudnn {
namespace {

// Enough for several large models; a plan keeps tens of kilobytes of host memory. Executables hold
// the plans that they use, so eviction costs a rebuild and never a dangling plan.
constexpr size_t kDefaultCapacity = 4096;

// Leaked on purpose: at exit cuDNN may be gone before static destructors run.
PlanCache<PlanRequest, Plan>& Plans() {
  static auto* plans = new PlanCache<PlanRequest, Plan>(kDefaultCapacity);
  return *plans;
}

}  // namespace

std::shared_ptr<const Plan> GetPlan(const PlanRequest& request) {
  return Plans().GetOrBuild(request, [&] { return BuildPlan(request); });
}

CacheInfo PlanCacheInfo() { return Plans().Info(); }
void ClearPlanCache() { Plans().Clear(); }
void SetPlanCacheCapacity(size_t capacity) { Plans().SetCapacity(capacity); }

}  // namespace jaxcudnn
