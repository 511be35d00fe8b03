// SPDX-License-Identifier: Apache-2.0
//
// The Python module: addresses for XLA, and the functions that lowering, tests and benchmarks call.
// The only file that includes nanobind; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <set>

#include "attributes.h"
#include "cudart.h"
#include "error.h"
#include "ffi_handlers.h"
#include "fork_guard.h"
#include "known_faults.h"
#include "libraries.h"
#include "planner.h"
#include "plans.h"
#include "stage_clock.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace jaxcudnn;

namespace {

nb::dict Registrations() {
  const FfiRegistration registration = ConvRegistration();
  nb::dict stages;
  stages["instantiate"] = nb::capsule(registration.instantiate);
  stages["initialize"] = nb::capsule(registration.initialize);
  stages["execute"] = nb::capsule(registration.execute);
  nb::dict targets;
  targets["jaxcudnn_conv_v1"] = stages;
  return targets;
}

nb::dict Types() {
  const FfiRegistration registration = ConvRegistration();
  nb::dict type;
  type["type_id"] = nb::capsule(registration.state_type_id);
  type["type_info"] = nb::capsule(registration.state_type_info);
  nb::dict types;
  types["jaxcudnn_conv_v1_state"] = type;
  return types;
}

std::pair<int, int> FfiApiVersion() {
  const FfiRegistration registration = ConvRegistration();
  return {registration.api_major, registration.api_minor};
}

/// The attributes of a custom call given as keyword arguments, as `ReadProblem` asks for them.
class Keywords {
 public:
  explicit Keywords(const nb::kwargs& values) : values_(values) {}

  /// Throws unless every argument was asked for.
  void CheckAllRead() const {
    for (auto [name, value] : values_) {
      const auto text = nb::cast<std::string>(name);
      if (!read_.count(text)) {
        throw nb::type_error(("there is no attribute '" + text + "'").c_str());
      }
    }
  }

  // Python names every attribute, so that a default here could only hide a slip.
  [[nodiscard]] std::string Text(const char* name, const char* = nullptr) const {
    return Get<std::string>(name);
  }
  [[nodiscard]] std::vector<int64_t> Sizes(const char* name) const {
    return Get<std::vector<int64_t>>(name);
  }
  [[nodiscard]] bool Flag(const char* name, bool = false) const { return Get<bool>(name); }
  [[nodiscard]] int64_t Number(const char* name) const { return Get<int64_t>(name); }

 private:
  template <typename T>
  [[nodiscard]] T Get(const char* name) const {
    T value{};
    read_.insert(name);
    if (!values_.contains(name) || !nb::try_cast<T>(values_[name], value)) {
      throw nb::type_error(
          ("attribute '" + std::string(name) + "' is missing or of the wrong type").c_str());
    }
    return value;
  }

  const nb::kwargs& values_;
  mutable std::set<std::string> read_;
};

Problem ProblemFrom(const nb::kwargs& attributes, int64_t alignment) {
  const Keywords keywords(attributes);
  Problem problem = ReadProblem(keywords);
  keywords.CheckAllRead();
  Validate(problem.spec);
  problem.alignment = alignment;
  return problem;
}

PlanRequest RequestFrom(int device, const nb::kwargs& attributes) {
  CheckNotForked();
  return {ProblemFrom(attributes, kFullAlignment), device};
}

/// Calls without the interpreter's lock: building and measuring take milliseconds, or seconds.
template <typename Call>
auto Unlocked(const Call& call) {
  nb::gil_scoped_release release;
  return call();
}

// Nanobind holds plans by pointers to what may change.
using PythonPlan = std::shared_ptr<Plan>;

PythonPlan ForPython(const PlanPointer& plan) { return std::const_pointer_cast<Plan>(plan); }

std::vector<PythonPlan> ForPython(const std::vector<PlanPointer>& plans) {
  std::vector<PythonPlan> all;
  for (const PlanPointer& plan : plans) all.push_back(ForPython(plan));
  return all;
}

/// Measures on memory that the caller has, and on a stream of its own, since nothing else uses it.
MeasuredPlan MeasureIn(const PlanRequest& request, uintptr_t memory, size_t bytes) {
  const OwnStream stream(request.device);
  const auto allocate = [=](size_t wanted) -> void* {
    return wanted <= bytes ? reinterpret_cast<void*>(memory) : nullptr;
  };
  return MeasurePlan(request, {request.device, stream.get(), allocate});
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "cuDNN plans for convolutions, and the XLA custom call that executes them.";

  // Refusals are facts about cuDNN rather than failures, so callers need to tell them apart.
  static nb::exception<Error> native_error(m, "NativeError", PyExc_RuntimeError);
  static nb::object unsupported = nb::exception<Error>(m, "UnsupportedError", native_error.ptr());
  static nb::object exhausted = nb::exception<Error>(m, "ExhaustedError", native_error.ptr());
  static nb::object invalid = nb::exception<Error>(m, "InvalidError", native_error.ptr());
  static const auto type_of = [](ErrorCode code) -> const nb::object& {
    switch (code) {
      case ErrorCode::kUnsupported:
        return unsupported;
      case ErrorCode::kResourceExhausted:
        return exhausted;
      case ErrorCode::kInvalidArgument:
        return invalid;
      default:
        return native_error;
    }
  };
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(type_of(error.code()).ptr(), error.what());
    }
  });

  m.def(
      "registrations", &Registrations,
      nb::sig("def registrations() -> dict[str, dict[str, typing.Any]]"),
      "Custom-call targets by name, each a dictionary of stages for jax.ffi.register_ffi_target.");
  m.def("types", &Types, nb::sig("def types() -> dict[str, typing.Any]"),
        "State types by name, for jax.ffi.register_ffi_type.");
  m.def(
      "schema", [] { return kSchema; },
      "The schema of the custom call's attributes that programs are written with.");
  m.def("ffi_api_version", &FfiApiVersion,
        "(major, minor) of the XLA FFI that the handlers were compiled against.");

  WatchForks();
  m.def("check_not_forked", &CheckNotForked,
        "Raises in a process that was forked from one in which CUDA had started.");
  m.def(
      "load_cudnn", [](const std::vector<std::string>& paths) { (void)LoadCudnn(paths); },
      "paths"_a,
      "Finds cuDNN: the copy in the process, else each path, else the dynamic linker's.");
  m.def(
      "cudnn_version", [] { return Cudnn().version; },
      "The version of the cuDNN in use: 91900 is 9.19.0.");
  m.def(
      "cudnn_compiled_version", [] { return CUDNN_VERSION; },
      "The version of the cuDNN whose headers this extension was compiled with.");
  m.def("oldest_cudnn", [] { return kOldestCudnn; }, "The oldest cuDNN that load_cudnn accepts.");
  m.def("cudnn_path", [] { return Cudnn().path; }, "The file of the cuDNN in use.");

  nb::class_<Plan>(m, "Plan", "A cuDNN execution plan.")
      .def_prop_ro("name", &Plan::name, "Engine and knobs, such as 'eng62_k2=0_k13=1'.")
      .def_prop_ro("workspace_size", &Plan::workspace_size, "Bytes of scratch memory it needs.")
      .def_prop_ro("notes", &Plan::notes, "cuDNN's numerical and behaviour notes.")
      .def_prop_ro(
          "source", [](const Plan& plan) { return plan.origin().source; },
          "How it was chosen: 'heuristic', 'named', 'measured' or 'stored'.")
      .def_prop_ro(
          "microseconds", [](const Plan& plan) { return plan.origin().microseconds; },
          "What it took when it was chosen; NaN if it was not timed.")
      .def_prop_ro(
          "tried", [](const Plan& plan) { return plan.origin().tried; },
          "How many plans were timed to choose it.");
  nb::class_<Timing>(m, "Timing", "What a plan took, or why that is not known.")
      .def_ro("name", &Timing::name)
      .def_ro("microseconds", &Timing::microseconds, "Of one run; NaN if it was not timed.")
      .def_ro("reason", &Timing::reason, "Why it was not timed, or is refused; else empty.");
  nb::class_<MeasuredPlan>(m, "Tuning", "What measuring found.")
      .def_prop_ro("plan", [](const MeasuredPlan& self) { return ForPython(self.plan); })
      .def_prop_ro("timings", [](const MeasuredPlan& self) { return self.tuning.timings; })
      .def_prop_ro(
          "milliseconds", [](const MeasuredPlan& self) { return self.tuning.milliseconds; },
          "What measuring cost.");

  m.def(
      "known_plan",
      [](int device, const nb::kwargs& attributes) {
        const PlanRequest request = RequestFrom(device, attributes);
        return ForPython(Unlocked([&] { return KnownPlan(request); }));
      },
      "device"_a, "attributes"_a,
      nb::sig("def known_plan(device: int, **attributes: typing.Any) -> Plan | None"),
      "The plan that a custom call will use on a device of this process, if that is known without "
      "measuring.");
  m.def(
      "candidates",
      [](int device, const nb::kwargs& attributes) {
        const PlanRequest request = RequestFrom(device, attributes);
        return ForPython(Unlocked([&] { return CandidatesFor(request); }));
      },
      "device"_a, "attributes"_a,
      nb::sig("def candidates(device: int, **attributes: typing.Any) -> list[Plan]"),
      "Every plan that measuring would time for a custom call, in cuDNN's order.");
  m.def(
      "largest_workspace",
      [](int device, const nb::kwargs& attributes) {
        const PlanRequest request = RequestFrom(device, attributes);
        return Unlocked([&] { return LargestWorkspace(request); });
      },
      "device"_a, "attributes"_a,
      nb::sig("def largest_workspace(device: int, **attributes: typing.Any) -> int"),
      "The most bytes of scratch memory that one of the candidates needs.");
  m.def(
      "bytes_to_measure",
      [](int device, const nb::kwargs& attributes) {
        const PlanRequest request = RequestFrom(device, attributes);
        return Unlocked([&] { return BytesToTune(request.problem, CandidatesFor(request)); });
      },
      "device"_a, "attributes"_a,
      nb::sig("def bytes_to_measure(device: int, **attributes: typing.Any) -> int"),
      "How much device memory `measure` needs to time all candidates.");
  m.def(
      "measure",
      [](int device, uintptr_t memory, size_t bytes, const nb::kwargs& attributes) {
        const PlanRequest request = RequestFrom(device, attributes);
        return Unlocked([&] { return MeasureIn(request, memory, bytes); });
      },
      "device"_a, "memory"_a, "bytes"_a, "attributes"_a,
      nb::sig("def measure(device: int, memory: int, bytes: int, **attributes: typing.Any) -> "
              "Tuning"),
      "Times the candidates in device memory that nothing else uses, and remembers the fastest "
      "where "
      "the algorithm is one that measures.");
  m.def(
      "plan_from_properties",
      [](const std::string& properties_json, int64_t alignment, const nb::kwargs& attributes) {
        const Problem problem = ProblemFrom(attributes, alignment);
        return ForPython(Unlocked([&] {
          const auto planner = PlannerFromProperties(properties_json);
          const PlanOptions& options = problem.options;
          return options.is_named() ? planner->Named(problem, options.algorithm, {"named"})
                                    : planner->First(problem);
        }));
      },
      "properties_json"_a, "alignment"_a = kFullAlignment, "attributes"_a,
      nb::sig("def plan_from_properties(properties_json: str, alignment: int = 16, **attributes: "
              "typing.Any) -> Plan"),
      "The named or first plan for a GPU described by cuDNN's JSON, which need not exist: for "
      "tests of planning.");
  m.def(
      "candidates_from_properties",
      [](const std::string& properties_json, const nb::kwargs& attributes) {
        const Problem problem = ProblemFrom(attributes, kFullAlignment);
        return ForPython(
            Unlocked([&] { return PlannerFromProperties(properties_json)->Candidates(problem); }));
      },
      "properties_json"_a, "attributes"_a,
      nb::sig("def candidates_from_properties(properties_json: str, **attributes: typing.Any) -> "
              "list[Plan]"),
      "The same of `candidates`.");

  nb::class_<ChoiceRecord>(m, "Choice", "A measured choice, and what it was made for.")
      .def(
          "__init__",
          [](ChoiceRecord* self, std::string key, std::string gpu, std::string plan,
             double microseconds, int64_t workspace, int64_t tried, double milliseconds,
             int64_t reserved) {
            new (self) ChoiceRecord{std::move(key),
                                    std::move(gpu),
                                    {std::move(plan), microseconds, workspace, tried, milliseconds,
                                     "stored", reserved}};
          },
          nb::kw_only(), "key"_a, "gpu"_a, "plan"_a, "microseconds"_a, "workspace"_a, "tried"_a,
          "milliseconds"_a, "reserved"_a)
      .def_ro("key", &ChoiceRecord::key)
      .def_ro("gpu", &ChoiceRecord::gpu)
      .def_prop_ro("plan", [](const ChoiceRecord& self) { return self.choice.plan; })
      .def_prop_ro("microseconds",
                   [](const ChoiceRecord& self) { return self.choice.microseconds; })
      .def_prop_ro("workspace", [](const ChoiceRecord& self) { return self.choice.workspace_size; })
      .def_prop_ro("tried", [](const ChoiceRecord& self) { return self.choice.tried; })
      .def_prop_ro("milliseconds",
                   [](const ChoiceRecord& self) { return self.choice.milliseconds; })
      .def_prop_ro("reserved", [](const ChoiceRecord& self) { return self.choice.reserved; });
  m.def(
      "choice_key",
      [](const nb::kwargs& attributes) {
        return ChoiceKey(ProblemFrom(attributes, kFullAlignment));
      },
      "attributes"_a, nb::sig("def choice_key(**attributes: typing.Any) -> str"),
      "The text under which the choice for a custom call is stored.");
  m.def("device_name", &DeviceName, "device"_a, "The driver's name of a GPU.");
  m.def("remember_choice", &RememberChoice, "choice"_a,
        "Takes in a choice that was stored by another process.");
  m.def("take_choices", &TakeChoices, "The choices measured since the last call.");

  nb::class_<KnownFaultText>(m, "KnownFault", "Plans that are never used, and why, in words.")
      .def_ro("op", &KnownFaultText::op, "'fprop', 'dgrad', 'wgrad' or 'any'.")
      .def_ro("engine", &KnownFaultText::engine, "'eng1', or which engines.")
      .def_ro("sm", &KnownFaultText::sm, "Compute capabilities: '86' is 8.6.")
      .def_ro("cudnn", &KnownFaultText::cudnn, "Versions.")
      .def_ro("cublaslt", &KnownFaultText::cublaslt, "Versions.")
      .def_ro("dtypes", &KnownFaultText::dtypes)
      .def_ro("condition", &KnownFaultText::condition, "Of which convolutions.")
      .def_ro("fault", &KnownFaultText::fault, "What is wrong.")
      .def_ro("source", &KnownFaultText::source, "Who says so.")
      .def("__str__", &Summary);
  m.def(
      "known_faults",
      [](size_t sm, size_t cudnn, size_t cublaslt) { return KnownFaultsOn({sm, cudnn, cublaslt}); },
      nb::kw_only(), "sm"_a = 0, "cudnn"_a = 0, "cublaslt"_a = 0,
      "The plans that are never used on a GPU (90 is compute capability 9.0) with these libraries "
      "(91900 is 9.19.0, 130601 is 13.6.1); what is 0 may be any.");

  nb::class_<CacheInfo>(m, "CacheInfo", "Counters of the plan cache.")
      .def_ro("hits", &CacheInfo::hits)
      .def_ro("misses", &CacheInfo::misses, "Look-ups that had to build.")
      .def_ro("builds", &CacheInfo::builds, "Look-ups that built a plan.")
      .def_ro("evictions", &CacheInfo::evictions)
      .def_ro("size", &CacheInfo::size)
      .def_ro("capacity", &CacheInfo::capacity)
      .def_ro("seconds", &CacheInfo::seconds, "Spent building and measuring.");
  m.def("cache_info", &PlanCacheInfo, "Counters of the process-wide plan cache.");
  m.def("cache_bytes", &PlanCacheBytes, "Host memory that the cached plans hold.");
  m.def("clear_cache", &ClearPlanCache, "Forgets every plan that no executable holds.");
  m.def("set_cache_capacity", &SetPlanCacheCapacity, "capacity"_a,
        "Sets how many plans are kept; the least recently used go first.");

  m.def(
      "time_stages", [](bool on) { StageClock::Get().Enable(on); }, "on"_a,
      "Starts (forgetting earlier samples) or stops the clock in the handlers.");
  m.def(
      "stage_samples",
      [] {
        nb::dict samples;
        samples["initialize"] = StageClock::Get().Samples(StageClock::kInitialize);
        samples["execute"] = StageClock::Get().Samples(StageClock::kExecute);
        samples["enqueue"] = StageClock::Get().Samples(StageClock::kEnqueue);
        return samples;
      },
      nb::sig("def stage_samples() -> dict[str, list[int]]"),
      "Host nanoseconds of the latest calls: of Initialize, of Execute as a whole, and of cuDNN's "
      "part of Execute.");
}
