// SPDX-License-Identifier: Apache-2.0
//
// Which plan is chosen, by a planner that only has names and a race whose end is known.
#include "plans.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"
#include "cudart.h"
#include "error.h"

namespace jaxcudnn {
namespace {

using testing::Throws;

constexpr int kDevice = 5;
const char* const kGpu = "a GPU";

std::map<std::string, int64_t> workspaces;  // of plans by name; none where it is not said

class NamedPlan final : public Plan {
 public:
  NamedPlan(std::string name, Origin origin) {
    workspace_size_ = workspaces.count(name) ? workspaces.at(name) : 0;
    name_ = std::move(name);
    origin_ = std::move(origin);
  }
  void Execute(cudnnHandle_t, const Buffers&, void*) const override {}
};

/// What cuDNN has, in its order, and what timing them gives; zero is a failure.
std::vector<std::string> offered;
std::map<std::string, double> times;
std::set<std::string> too_large;  // for the memory that there is
std::string compiled;             // what it would compile at run time
int races = 0, lists = 0, compilations = 0;
size_t raced = 0;  // plans in the last race

class ListPlanner final : public Planner {
 public:
  [[nodiscard]] PlanPointer First(const Problem&) const override {
    return std::make_shared<NamedPlan>(offered.at(0), Origin{});
  }
  [[nodiscard]] PlanPointer Named(const Problem&, std::string_view name,
                                  const Origin& origin) const override {
    if (std::find(offered.begin(), offered.end(), name) == offered.end() && name != compiled) {
      throw Error(ErrorCode::kInvalidArgument, "no such plan");
    }
    return std::make_shared<NamedPlan>(std::string(name), origin);
  }
  [[nodiscard]] std::vector<PlanPointer> Candidates(const Problem&) const override {
    ++lists;
    std::vector<PlanPointer> plans;
    for (const std::string& name : offered) {
      plans.push_back(std::make_shared<NamedPlan>(name, Origin{}));
    }
    return plans;
  }
  [[nodiscard]] PlanPointer Compiled(const Problem&) const override {
    ++compilations;
    return compiled.empty() ? nullptr : std::make_shared<NamedPlan>(compiled, Origin{});
  }
};

}  // namespace

// In place of planner.cc, tuner.cc and libraries.cc, whose functions need cuDNN and CUDA.

const Planner& PlannerOf(int) {
  static const ListPlanner planner;
  return planner;
}

std::string DeviceName(int) { return kGpu; }

int64_t Tuning::tried() const { return static_cast<int64_t>(timings.size()); }

Tuning Tune(const Problem&, const std::vector<PlanPointer>& candidates, const Bench&) {
  ++races;
  raced = candidates.size();
  Tuning tuning;
  for (size_t i = 0; i < candidates.size(); ++i) {
    Timing& timing = tuning.timings.emplace_back();
    timing.name = candidates[i]->name();
    if (too_large.count(timing.name)) {
      timing.reason = "memory is short";
    } else if (const double us = times.at(timing.name); us == 0) {
      timing.reason = "it computes 1 for 2";
      timing.failed = true;
    } else {
      timing.microseconds = us;
      const bool is_best =
          tuning.fastest == kNone || us < tuning.timings[tuning.fastest].microseconds;
      if (is_best) tuning.fastest = i;
    }
  }
  return tuning;
}

namespace {

const Bench kBench{kDevice, nullptr, nullptr};

PlanRequest Request(const std::string& algorithm, bool verify = true, bool deterministic = false) {
  return {{{ConvOp::kFprop,
            {1, 1, 1, 1},
            {1, 1, 1, 1},
            {1, 1, 1, 1},
            {1, 1},
            {0, 0},
            {0, 0},
            {1, 1},
            false,
            DataType::kFloat32,
            true},
           {algorithm, deterministic, false, true, "", verify, 64, 5000, 250000},
           1 << 20,
           kFullAlignment},
          kDevice};
}

/// Forgets everything; then cuDNN has these.
void Offer(const std::map<std::string, double>& plans) {
  ClearPlanCache();
  (void)TakeChoices();
  offered.clear();
  times = plans;
  too_large.clear();
  compiled.clear();
  for (const auto& [name, us] : plans) offered.push_back(name);
  races = lists = compilations = 0;
}

ChoiceRecord Stored(const PlanRequest& request, const std::string& plan) {
  return {ChoiceKey(request.problem), kGpu, {plan, 7, 0, 3, 9, "stored"}};
}

void TheFastestIsRememberedAndToBeStored() {
  Offer({{"eng1", 50}, {"eng2", 40}});
  const PlanRequest request = Request("measure");
  CHECK(KnownPlan(request) == nullptr);
  const PlanPointer plan = GetPlan(request, kBench);
  CHECK(plan->name() == "eng2" && plan->origin().source == "measured");
  CHECK(plan->origin().microseconds == 40);
  CHECK(KnownPlan(request) == plan && GetPlan(request, kBench) == plan && races == 1);
  const std::vector<ChoiceRecord> fresh = TakeChoices();
  CHECK(fresh.size() == 1 && fresh.at(0).choice.plan == "eng2" && fresh.at(0).gpu == kGpu);
  CHECK(fresh.at(0).key == ChoiceKey(request.problem));
}

void WhatIsStoredIsNotMeasured() {
  Offer({{"eng1", 50}, {"eng2", 40}});
  const PlanRequest request = Request("measure");
  RememberChoice(Stored(request, "eng1"));
  const PlanPointer plan = KnownPlan(request);
  CHECK(plan && plan->name() == "eng1" && plan->origin().source == "stored");
  CHECK(GetPlan(request, kBench) == plan && races == 0);
}

void AStoredPlanThatIsGoneIsMeasuredAnew() {
  Offer({{"eng1", 50}, {"eng2", 40}});
  const PlanRequest request = Request("measure");
  RememberChoice(Stored(request, "eng9"));
  CHECK(KnownPlan(request) == nullptr);
  CHECK(GetPlan(request, kBench)->name() == "eng2" && races == 1);
  CHECK(KnownPlan(request)->name() == "eng2");
  CHECK(TakeChoices().size() == 1);
  RememberChoice(Stored(Request("measure", true, true), "eng9"));
  CHECK(KnownPlan(Request("measure", true, true))->name() == "eng1");  // which times nothing
}

void MeasuringChangesOnlyWhatIsChosenByMeasuring() {
  for (const char* algorithm : {"heuristic", "eng3"}) {
    Offer({{"eng1", 50}, {"eng2", 40}, {"eng3", 60}});
    const std::string kept = algorithm == std::string("eng3") ? "eng3" : "eng1";
    const PlanRequest request = Request(algorithm);
    CHECK_FOR(MeasurePlan(request, kBench).plan->name() == "eng2", algorithm);
    CHECK_FOR(KnownPlan(request)->name() == kept, algorithm);
    CHECK_FOR(GetPlan(request, kBench)->name() == kept, algorithm);
    CHECK_FOR(TakeChoices().empty(), algorithm);
  }
  for (const bool deterministic : {false, true}) {
    Offer({{"eng1", 50}, {"eng2", 40}});
    const PlanRequest request = Request("exhaustive", true, deterministic);
    const PlanPointer plan = MeasurePlan(request, kBench).plan;
    CHECK(plan->name() == "eng2" && KnownPlan(request) == plan && TakeChoices().size() == 1);
  }
}

void WhatHasFailedIsNotTakenForWantOfMemory() {
  Offer({{"eng1", 0}, {"eng2", 40}, {"eng3", 30}});
  too_large = {"eng2", "eng3"};
  CHECK(GetPlan(Request("measure"), kBench)->name() == "eng2");
  CHECK(KnownPlan(Request("measure"))->origin().source == "heuristic");
  CHECK(TakeChoices().empty());
  too_large = {"eng1", "eng2", "eng3"};
  CHECK(GetPlan(Request("exhaustive"), kBench)->name() == "eng1");
}

void CandidatesAreKeptUntilTheyAreTimed() {
  Offer({{"eng1", 50}, {"eng2", 40}});
  constexpr int kConvolutions = 200;
  std::vector<PlanRequest> requests(kConvolutions, Request("measure"));
  for (int i = 0; i < kConvolutions; ++i) {
    requests[static_cast<size_t>(i)].problem.workspace_limit += i;
  }
  for (const PlanRequest& request : requests) CHECK(LargestWorkspace(request) == 0);
  const std::weak_ptr<const Plan> candidate = CandidatesFor(requests.at(7)).at(1);
  CHECK(!candidate.expired());
  for (const PlanRequest& request : requests) (void)GetPlan(request, kBench);
  CHECK(lists == kConvolutions && candidate.expired());
}

void TheLargestWorkspaceIsTheSameWhateverWasMeasured() {
  workspaces = {{"eng1", 10}, {"eng2", 20}, {"eng3", 5}};
  Offer({{"eng1", 50}, {"eng2", 60}, {"eng3", 40}});
  const PlanRequest request = Request("measure");
  CHECK(LargestWorkspace(request) == 20 && lists == 1);
  CHECK(GetPlan(request, kBench)->workspace_size() == 5);
  const ChoiceRecord fresh = TakeChoices().at(0);
  CHECK(fresh.choice.reserved == 20);
  CHECK(LargestWorkspace(request) == 20 && lists == 1);

  for (const bool is_known : {true, false}) {  // in a process that has it from the store
    Offer({{"eng1", 50}, {"eng2", 60}, {"eng3", 40}});
    RememberChoice({fresh.key, fresh.gpu, {"eng3", 40, 5, 3, 9, "stored", is_known ? 20 : 0}});
    CHECK(LargestWorkspace(request) == 20 && lists == !is_known);
    CHECK(LargestWorkspace(request) == 20 && lists == !is_known);
  }

  Offer({{"eng1", 50}, {"eng2", 60}});
  const PlanRequest untimed = Request("measure", true, true);
  CHECK(LargestWorkspace(untimed) == 20 && lists == 1);
  (void)CandidatesFor(untimed);
  CHECK(lists == 2);  // since nobody would have timed them
  workspaces.clear();
}

void IfAllComputeWrongNumbersThereIsNone() {
  Offer({{"eng1", 0}, {"eng2", 0}});
  const PlanRequest request = Request("measure");
  for (int call = 0; call < 2; ++call) {
    CHECK(Throws(ErrorCode::kUnsupported, "of eng1, it computes 1 for 2",
                 [&] { (void)GetPlan(request, kBench); }));
  }
  CHECK(races == 1);
  CHECK(Throws(ErrorCode::kUnsupported, "no cuDNN plan passed verification",
               [&] { (void)KnownPlan(request); }));
  CHECK(GetPlan(Request("measure", false), kBench)->name() == "eng1");
}

PlanRequest Depthwise(int64_t channels, const std::string& algorithm = "measure") {
  PlanRequest request = Request(algorithm);
  request.problem.spec.x = request.problem.spec.y = {1, channels, 1, 1};
  request.problem.spec.w = {channels, 1, 1, 1};
  return request;
}

void ASlowDepthwiseConvolutionIsWorthCompiling() {
  Offer({{"eng1", 500}, {"eng2", 400}});
  compiled = "eng5";
  times["eng5"] = 80;
  PlanRequest request = Depthwise(2);
  CHECK(GetPlan(request, kBench)->name() == "eng5" && compilations == 1);
  CHECK(races == 2 && raced == 1);  // since the budget may be exceeded by one candidate
  const std::vector<ChoiceRecord> fresh = TakeChoices();
  CHECK(fresh.size() == 1 && fresh.at(0).choice.plan == "eng5" && fresh.at(0).choice.tried == 3);

  Offer({{"eng1", 500}, {"eng2", 400}});
  compiled = "eng5";
  times["eng5"] = 450;  // which was not known before
  const MeasuredPlan slower = MeasurePlan(request, kBench);
  CHECK(slower.plan->name() == "eng2" && slower.tuning.timings.size() == 3);
  CHECK(slower.tuning.timings.at(2).microseconds == 450);

  Offer({{"eng1", 500}, {"eng2", 400}});  // there is none
  CHECK(GetPlan(request, kBench)->name() == "eng2" && compilations == 1);
}

void OthersAreNotCompiled() {
  const auto compilations_for = [](const PlanRequest& request, double us) {
    Offer({{"eng1", us}});
    (void)GetPlan(request, kBench);
    return compilations;
  };
  CHECK(compilations_for(Depthwise(2), 301) == 1);
  CHECK(compilations_for(Depthwise(2), 299) == 0);
  CHECK(compilations_for(Depthwise(1 << 28), 1000) == 0);         // about as fast as memory
  CHECK(compilations_for(Depthwise(2, "exhaustive"), 400) == 0);  // it has been timed
  CHECK(compilations_for(Request("measure"), 400) == 1);          // one channel is depthwise, too
  PlanRequest forbidden = Depthwise(2);
  forbidden.problem.options.allow_runtime_compilation = false;
  CHECK(compilations_for(forbidden, 400) == 0);
  PlanRequest dense = Depthwise(2);
  dense.problem.spec.w = {2, 2, 1, 1};
  CHECK(compilations_for(dense, 400) == 0);
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  TheFastestIsRememberedAndToBeStored();
  WhatIsStoredIsNotMeasured();
  AStoredPlanThatIsGoneIsMeasuredAnew();
  MeasuringChangesOnlyWhatIsChosenByMeasuring();
  WhatHasFailedIsNotTakenForWantOfMemory();
  CandidatesAreKeptUntilTheyAreTimed();
  TheLargestWorkspaceIsTheSameWhateverWasMeasured();
  IfAllComputeWrongNumbersThereIsNone();
  ASlowDepthwiseConvolutionIsWorthCompiling();
  OthersAreNotCompiled();
  return testing::failures != 0;
}
