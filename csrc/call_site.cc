// SPDX-License-Identifier: Apache-2.0
#include "call_site.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>

#include "error.h"
#include "libraries.h"
#include "plans.h"
#include "stage_clock.h"

namespace jaxcudnn {
namespace {

// Where a copy may start: as XLA's own buffers do.
constexpr int64_t kCopyAlignment = 256;

constexpr const char* kNotInitialized =
    "Execute was reached without Initialize for buffers at such addresses";

int64_t RoundUp(int64_t bytes) {
  return (bytes + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment;
}

bool IsAligned(const void* buffer) {
  return reinterpret_cast<uintptr_t>(buffer) % kFullAlignment == 0;
}

bool AreAligned(const Buffers& buffers) {
  return std::all_of(buffers.begin(), buffers.end(), &IsAligned);
}

BufferSizes BytesOfAll(const ConvSpec& spec) {
  BufferSizes bytes{};
  for (Operand operand : kAllOperands) {
    bytes[static_cast<size_t>(operand)] = BytesOf(spec, operand);
  }
  return bytes;
}

/// Stands in x and y for the number of images that the buffers hold.
constexpr int64_t kAnyNumber = 0;

Problem WithImages(Problem problem, int64_t images) {
  problem.spec.x[0] = problem.spec.y[0] = images;
  return problem;
}

bool HasAnyNumber(const ConvSpec& spec) {
  return !spec.x.empty() && !spec.y.empty() && spec.x[0] == kAnyNumber && spec.y[0] == kAnyNumber;
}

/// The sizes of the first operand.
const std::vector<int64_t>& FirstSizes(const ConvSpec& spec) {
  return spec.op == ConvOp::kDgrad ? spec.y : spec.x;
}

void SayOnceThatThisIsSlow() {
  static const bool said = [] {
    std::fprintf(stderr,
                 "jaxcudnn: a convolution's input or output lies at an address that is not a "
                 "multiple of 16 bytes (a slice of a larger array); it is computed by a correct "
                 "but slow plan. jax.lax.optimization_barrier on the slice makes it fast.\n");
    return true;
  }();
  (void)said;
}

}  // namespace

CallSite::CallSite(Problem problem)
    : problem_(std::move(problem)), bytes_(BytesOfAll(problem_.spec)) {}

void CallSite::CheckSizes(const BufferSizes& bytes) const {
  if (bytes == bytes_) return;
  const auto text = [](const BufferSizes& sizes) {
    return TextOf(std::vector<int64_t>(sizes.begin(), sizes.end()));
  };
  throw Error(ErrorCode::kInvalidArgument,
              "the operands, the result, residual and bias must hold " + text(bytes_) +
                  " bytes, got " + text(bytes) + ". The convolution: " + TextOf(problem_.spec));
}

void CallSite::Prepare(const Bench& bench, const Buffers& buffers, const Workspace& workspace) {
  (void)HandleOf(bench.device);  // so that Execute never creates it; refuses one out of range
  const Plan& fast = PreparePlan(kFast, bench, workspace);
  Buffers moved = buffers;
  if (AreAligned(buffers) || Relocate(fast, workspace, moved)) return;
  PreparePlan(kAnyAddress, bench, workspace);
  SayOnceThatThisIsSlow();
}

const Plan& CallSite::PreparePlan(Kind kind, const Bench& bench, const Workspace& workspace) {
  std::atomic<const Plan*>& slot = plans_[static_cast<size_t>(bench.device)][kind];
  if (const Plan* plan = slot.load(std::memory_order_acquire)) return *plan;
  PlanPointer plan = FindPlan(kind, bench, workspace);
  std::lock_guard<std::mutex> lock(mutex_);
  owned_.push_back(plan);  // another thread may have stored the same one
  slot.store(plan.get(), std::memory_order_release);
  return *plan;
}

PlanPointer CallSite::FindPlan(Kind kind, const Bench& bench, const Workspace& workspace) const {
  PlanRequest request{problem_, bench.device};
  if (kind == kFast) {
    // On the machine that sized the workspace this is a plan that it was sized for. Elsewhere that
    // plan may need more: then one that fits what there is.
    auto plan = GetPlan(request, bench);
    if (plan->workspace_size() <= workspace.bytes) return plan;
  } else {
    request.problem.alignment = RowOf(problem_.spec.dtype).bytes;
    request.problem.options.algorithm = "heuristic";
  }
  request.problem.workspace_limit = workspace.bytes;
  return GetPlan(request, bench);
}

const Plan& CallSite::PreparedPlan(Kind kind, int device) const {
  const Plan* plan = nullptr;
  if (device >= 0 && device < kMaxDevices) {
    plan = plans_[static_cast<size_t>(device)][kind].load(std::memory_order_acquire);
  }
  if (!plan) {
    throw Error(ErrorCode::kFailedPrecondition, kNotInitialized);
  }
  return *plan;
}

/// Gives each misaligned buffer a place behind the plan's own part of the workspace; false if that
/// is too small.
bool CallSite::Relocate(const Plan& plan, const Workspace& workspace, Buffers& buffers) const {
  int64_t offset = RoundUp(plan.workspace_size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (IsAligned(buffers[i])) continue;
    buffers[i] = static_cast<char*>(workspace.data) + offset;
    offset += RoundUp(bytes_[i]);
  }
  return offset <= workspace.bytes;
}

void CallSite::Execute(int device, cudaStream_t stream, const Buffers& buffers,
                       const Workspace& workspace) const {
  const Plan* plan = &PreparedPlan(kFast, device);
  Buffers moved = buffers;
  if (!AreAligned(buffers) && !Relocate(*plan, workspace, moved)) {
    plan = &PreparedPlan(kAnyAddress, device);
    moved = buffers;
  }
  const auto copy = [&](size_t i, void* to, const void* from) {
    if (moved[i] != buffers[i]) CopyOnDevice(to, from, static_cast<size_t>(bytes_[i]), stream);
  };
  constexpr auto kResult = static_cast<size_t>(Operand::kResult);
  for (size_t i = 0; i < kOperands; ++i) {
    if (i != kResult) copy(i, moved[i], buffers[i]);
  }
  {
    HandleLease lease(HandleOf(device), stream);
    SectionTimer timer(StageClock::kEnqueue);
    plan->Execute(lease.get(), moved, workspace.data);
  }
  copy(kResult, buffers[kResult], moved[kResult]);
}

LateCallSite::LateCallSite(Problem problem) : problem_(std::move(problem)) {
  const bool is_late = HasAnyNumber(problem_.spec);
  Validate(is_late ? WithImages(problem_, 1).spec : problem_.spec);
  if (is_late) return;
  owned_ = std::make_unique<CallSite>(problem_);
  site_ = owned_.get();
}

CallSite& LateCallSite::ForElements(int64_t elements) {
  if (CallSite* site = site_.load(std::memory_order_acquire)) return *site;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!owned_) {
    const std::vector<int64_t>& sizes = FirstSizes(problem_.spec);
    const int64_t of_one =
        std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{1}, std::multiplies<>());
    Problem problem = WithImages(problem_, elements / of_one);
    Validate(problem.spec);  // which may refuse so many
    owned_ = std::make_unique<CallSite>(std::move(problem));
    site_.store(owned_.get(), std::memory_order_release);
  }
  return *owned_;
}

const CallSite& LateCallSite::known() const {
  const CallSite* site = site_.load(std::memory_order_acquire);
  if (!site) throw Error(ErrorCode::kFailedPrecondition, kNotInitialized);
  return *site;
}

}  // namespace jaxcudnn
