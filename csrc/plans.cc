// SPDX-License-Identifier: Apache-2.0
#include "plans.h"

#include <algorithm>
#include <mutex>
#include <tuple>
#include <utility>

#include "cudart.h"
#include "error.h"
#include "fields.h"
#include "libraries.h"

namespace jaxcudnn {

/// Under which a choice is known in this process: every GPU of one name shares it.
struct ChoiceId {
  std::string key;
  std::string gpu;

  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"key", key}, Field{"gpu", gpu});
  }
};

namespace {

// Enough for several large models; a plan keeps tens of kilobytes of host memory. Executables hold
// the plans that they use, so eviction costs a rebuild and never a dangling plan.
constexpr size_t kDefaultCapacity = 4096;

// Candidates are kept from lowering, which asks for their workspace, to the first run, which times
// them: as many lists as a large model has different convolutions, ResNet-50's training step 68. A
// list holds some forty plans, which are more than a megabyte, and so goes when they are timed.
constexpr size_t kListCapacity = 256;

using PlanList = std::vector<PlanPointer>;

// All of these are leaked on purpose: at exit cuDNN may be gone before static destructors run.
PlanCache<PlanRequest, Plan>& Plans() {
  static auto* plans = new PlanCache<PlanRequest, Plan>(kDefaultCapacity);
  return *plans;
}

PlanCache<PlanRequest, PlanList>& Lists() {
  static auto* lists = new PlanCache<PlanRequest, PlanList>(kListCapacity);
  return *lists;
}

PlanCache<ChoiceId, Choice>& Choices() {
  static auto* choices = new PlanCache<ChoiceId, Choice>(4 * kDefaultCapacity);
  return *choices;
}

/// What LargestWorkspace has given, which outlives the lists.
PlanCache<ChoiceId, int64_t>& Sizes() {
  static auto* sizes = new PlanCache<ChoiceId, int64_t>(4 * kDefaultCapacity);
  return *sizes;
}

/// Choices made here that nobody has stored yet.
class FreshChoices {
 public:
  void Add(ChoiceRecord record) {
    constexpr size_t kMost = 65536;  // if nobody ever takes them
    std::lock_guard<std::mutex> lock(mutex_);
    if (records_.size() < kMost) records_.push_back(std::move(record));
  }

  std::vector<ChoiceRecord> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<ChoiceRecord> records_;
};

FreshChoices& Fresh() {
  static auto* fresh = new FreshChoices;
  return *fresh;
}

ChoiceId IdOf(const PlanRequest& request) {
  return {ChoiceKey(request.problem), DeviceName(request.device)};
}

PlanPointer FirstPlan(const PlanRequest& request) {
  return PlannerOf(request.device).First(request.problem);
}

/// The chosen plan; null if this cuDNN has it no more.
PlanPointer ChosenPlan(const PlanRequest& request, const Choice& choice) {
  try {
    return PlannerOf(request.device)
        .Named(request.problem, choice.plan, {choice.source, choice.microseconds, choice.tried});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    return nullptr;
  }
}

std::shared_ptr<const PlanList> ListFor(const PlanRequest& request) {
  return Lists().GetOrBuild(request, [&] {
    return std::make_shared<const PlanList>(PlannerOf(request.device).Candidates(request.problem));
  });
}

int64_t LargestOf(const PlanList& list) {
  int64_t largest = 0;
  for (const PlanPointer& plan : list) largest = std::max(largest, plan->workspace_size());
  return largest;
}

struct Measured {
  Choice choice;
  Tuning tuning;
};

/// Whether compiling a plan at run time may pay: it takes about a second, and for depthwise
/// convolutions cuDNN has kernels of that kind that run at the speed of memory.
bool MayPayToCompile(const Problem& problem, double microseconds) {
  constexpr double kLong_us = 300;              // a second is then earned in some thousand runs
  constexpr double kBytesPerMicrosecond = 2e6;  // half of what the fastest GPUs move
  const ConvSpec& spec = problem.spec;
  const double slow_us = static_cast<double>(BytesOf(spec)) / kBytesPerMicrosecond;
  return problem.options.allow_runtime_compilation && !problem.options.is_exhaustive() &&
         HasOneChannelAGroup(spec) && microseconds > std::max(kLong_us, slow_us);
}

/// Times one more plan, if the fastest of a list leaves something to be wished for. It is the one
/// candidate by which the budget may be exceeded. It joins the list if it needs no more workspace
/// than there is.
void TimeCompiled(const PlanRequest& request, const Bench& bench, PlanList& list, Tuning& tuning) {
  if (tuning.fastest == kNone) return;
  if (!MayPayToCompile(request.problem, tuning.timings[tuning.fastest].microseconds)) return;
  PlanPointer compiled = PlannerOf(request.device).Compiled(request.problem);
  const auto needs_less = [&](const PlanPointer& plan) {
    return plan->workspace_size() >= compiled->workspace_size();
  };
  if (!compiled || std::none_of(list.begin(), list.end(), needs_less)) return;
  const Tuning alone = Tune(request.problem, {compiled}, bench);
  tuning.milliseconds += alone.milliseconds;
  tuning.timings.push_back(alone.timings[0]);
  list.push_back(std::move(compiled));
  const double best = tuning.timings[tuning.fastest].microseconds;
  if (tuning.timings.back().microseconds < best) tuning.fastest = list.size() - 1;  // false for NaN
}

/// Times the candidates. If none could be, the choice is the first that has not failed, which
/// nothing stores; and nor is what was timed although the options choose otherwise.
Measured MeasureChoice(const PlanRequest& request, const ChoiceId& id, const Bench& bench) {
  const auto list = std::make_shared<PlanList>(*ListFor(request));
  const int64_t reserved = LargestOf(*list);  // as programs are lowered with, before one may join
  Tuning tuning = Tune(request.problem, *list, bench);
  Lists().Forget(request);
  TimeCompiled(request, bench, *list, tuning);
  if (tuning.fastest == kNone) {
    const auto has_failed = [](const Timing& timing) { return timing.failed; };
    const auto untried = std::find_if_not(tuning.timings.begin(), tuning.timings.end(), has_failed);
    if (request.problem.options.verify && untried == tuning.timings.end()) {
      for (const Timing& timing : tuning.timings) {
        if (timing.reason.empty()) continue;
        const bool refused = timing.reason.rfind("it computes", 0) == 0;
        if (refused) {
          throw Error(ErrorCode::kUnsupported,
                      "no cuDNN plan passed verification, so that convolutions like this one are "
                      "left to XLA in programs compiled from now on; of " +
                          timing.name + ", " + timing.reason);
        }
      }
    }
    const bool is_second = untried != tuning.timings.begin() && untried != tuning.timings.end();
    const PlanPointer first = is_second
                                  ? (*list)[static_cast<size_t>(untried - tuning.timings.begin())]
                                  : FirstPlan(request);
    return {{first->name(), first->origin().microseconds, first->workspace_size(), 0,
             tuning.milliseconds, first->origin().source, reserved},
            std::move(tuning)};
  }
  const PlanPointer& plan = (*list)[tuning.fastest];
  Choice choice{plan->name(),
                tuning.timings[tuning.fastest].microseconds,
                plan->workspace_size(),
                tuning.tried(),
                tuning.milliseconds,
                "measured",
                reserved};
  if (request.problem.options.is_measured()) Fresh().Add({id.key, id.gpu, choice});
  return {std::move(choice), std::move(tuning)};
}

/// Whether running it would time plans. Deterministic plans are only taken from earlier choices.
bool IsTimed(const PlanOptions& options) { return options.is_measured() && !options.deterministic; }

PlanPointer Unmeasured(const PlanRequest& request) {
  const PlanOptions& options = request.problem.options;
  return Plans().GetOrBuild(request, [&] {
    if (!options.is_named()) return FirstPlan(request);
    return PlannerOf(request.device).Named(request.problem, options.algorithm, {"named"});
  });
}

}  // namespace

std::string ChoiceKey(const Problem& problem) { return TextOf(problem); }

PlanPointer KnownPlan(const PlanRequest& request) {
  const PlanOptions& options = request.problem.options;
  if (!options.is_measured()) return Unmeasured(request);
  if (PlanPointer plan = Plans().Find(request)) return plan;
  if (const auto choice = Choices().Find(IdOf(request))) {
    if (PlanPointer plan = ChosenPlan(request, *choice)) {
      Plans().Put(request, plan);
      return plan;
    }
  }
  return IsTimed(options) ? nullptr : Unmeasured(request);
}

PlanPointer GetPlan(const PlanRequest& request, const Bench& bench) {
  if (PlanPointer plan = KnownPlan(request)) return plan;
  return Plans().GetOrBuild(request, [&] {
    const ChoiceId id = IdOf(request);
    const auto choose = [&] {
      return std::make_shared<const Choice>(MeasureChoice(request, id, bench).choice);
    };
    if (PlanPointer plan = ChosenPlan(request, *Choices().GetOrBuild(id, choose))) return plan;
    // One that was stored and is not to be had any more, such as one of a fault found since.
    const std::shared_ptr<const Choice> anew = choose();
    Choices().Put(id, anew);
    PlanPointer plan = ChosenPlan(request, *anew);
    return plan ? plan : FirstPlan(request);
  });
}

MeasuredPlan MeasurePlan(const PlanRequest& request, const Bench& bench) {
  const ChoiceId id = IdOf(request);
  Measured measured = MeasureChoice(request, id, bench);
  PlanPointer plan = ChosenPlan(request, measured.choice);
  if (!plan) plan = FirstPlan(request);
  if (measured.tuning.fastest != kNone && request.problem.options.is_measured()) {
    Choices().Put(id, std::make_shared<const Choice>(std::move(measured.choice)));
    Plans().Put(request, plan);
  }
  return {std::move(plan), std::move(measured.tuning)};
}

std::vector<PlanPointer> CandidatesFor(const PlanRequest& request) { return *ListFor(request); }

int64_t LargestWorkspace(const PlanRequest& request) {
  const ChoiceId id = IdOf(request);
  return *Sizes().GetOrBuild(id, [&] {
    const auto choice = Choices().Find(id);
    if (choice && choice->reserved > 0) return std::make_shared<const int64_t>(choice->reserved);
    const int64_t largest = LargestOf(*ListFor(request));
    if (choice || !IsTimed(request.problem.options)) Lists().Forget(request);  // nobody else asks
    return std::make_shared<const int64_t>(largest);
  });
}

void RememberChoice(const ChoiceRecord& record) {
  Choices().Put({record.key, record.gpu}, std::make_shared<const Choice>(record.choice));
}

std::vector<ChoiceRecord> TakeChoices() { return Fresh().Take(); }

CacheInfo PlanCacheInfo() { return Plans().Info(); }

int64_t PlanCacheBytes() {
  return Plans().Sum([](const Plan& plan) { return plan.host_bytes(); });
}

void ClearPlanCache() {
  Plans().Clear();
  Lists().Clear();
  Sizes().Clear();
  Choices().Clear();
}

void SetPlanCacheCapacity(size_t capacity) { Plans().SetCapacity(capacity); }

}  // namespace jaxcudnn
