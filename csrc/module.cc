// SPDX-License-Identifier: Apache-2.0
//
// The Python module: addresses for XLA, and the functions that lowering, tests and benchmarks call.
// The only file that includes nanobind; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "conv_spec.h"
#include "error.h"
#include "ffi_handlers.h"
#include "known_faults.h"
#include "libraries.h"
#include "planner.h"
#include "plans.h"
#include "stage_clock.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace jaxcudnn;

namespace {

using Sizes = std::vector<int64_t>;

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

PlanRequest RequestFrom(const std::string& op, Sizes x, Sizes w, Sizes y, Sizes stride,
                        Sizes pre_padding, Sizes post_padding, Sizes dilation, bool flip,
                        const std::string& dtype, bool allow_tf32, int64_t workspace_limit,
                        int device, int64_t alignment) {
  ConvSpec spec{ConvOpFromName(op),
                std::move(x),
                std::move(w),
                std::move(y),
                std::move(stride),
                std::move(pre_padding),
                std::move(post_padding),
                std::move(dilation),
                flip,
                DataTypeFromName(dtype),
                allow_tf32};
  Validate(spec);
  return {std::move(spec), workspace_limit, alignment, device};
}

using PlanPointer = std::shared_ptr<const Plan>;

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "cuDNN plans for convolutions, and the XLA custom call that executes them.";

  // Both refusals are facts about cuDNN rather than failures, so callers need to tell them apart.
  static nb::exception<Error> native_error(m, "NativeError", PyExc_RuntimeError);
  static nb::object unsupported = nb::exception<Error>(m, "UnsupportedError", native_error.ptr());
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(
          error.code() == ErrorCode::kUnsupported ? unsupported.ptr() : native_error.ptr(),
          error.what());
    }
  });

  m.def(
      "registrations", &Registrations,
      nb::sig("def registrations() -> dict[str, dict[str, typing.Any]]"),
      "Custom-call targets by name, each a dictionary of stages for jax.ffi.register_ffi_target.");
  m.def("types", &Types, nb::sig("def types() -> dict[str, typing.Any]"),
        "State types by name, for jax.ffi.register_ffi_type.");
  m.def("ffi_api_version", &FfiApiVersion,
        "(major, minor) of the XLA FFI that the handlers were compiled against.");

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
      .def_prop_ro("notes", &Plan::notes, "cuDNN's numerical and behaviour notes.");

  m.def(
      "plan",
      [](const std::string& op, Sizes x, Sizes w, Sizes y, Sizes stride, Sizes pre_padding,
         Sizes post_padding, Sizes dilation, bool flip, const std::string& dtype, bool allow_tf32,
         int64_t workspace_limit, int device, int64_t alignment) {
        const PlanRequest request =
            RequestFrom(op, std::move(x), std::move(w), std::move(y), std::move(stride),
                        std::move(pre_padding), std::move(post_padding), std::move(dilation), flip,
                        dtype, allow_tf32, workspace_limit, device, alignment);
        nb::gil_scoped_release release;  // a build takes milliseconds, sometimes seconds
        return std::const_pointer_cast<Plan>(GetPlan(request));
      },
      nb::kw_only(), "op"_a, "x"_a, "w"_a, "y"_a, "stride"_a, "pre_padding"_a, "post_padding"_a,
      "dilation"_a, "flip"_a, "dtype"_a, "allow_tf32"_a, "workspace_limit"_a, "device"_a = 0,
      "alignment"_a = kFullAlignment,
      "The plan that the custom call with these attributes will use on a device of this process.");
  m.def(
      "plan_from_properties",
      [](const std::string& properties_json, const std::string& op, Sizes x, Sizes w, Sizes y,
         Sizes stride, Sizes pre_padding, Sizes post_padding, Sizes dilation, bool flip,
         const std::string& dtype, bool allow_tf32, int64_t workspace_limit, int64_t alignment) {
        const PlanRequest request =
            RequestFrom(op, std::move(x), std::move(w), std::move(y), std::move(stride),
                        std::move(pre_padding), std::move(post_padding), std::move(dilation), flip,
                        dtype, allow_tf32, workspace_limit, 0, alignment);
        nb::gil_scoped_release release;
        return std::const_pointer_cast<Plan>(BuildPlanFromProperties(request, properties_json));
      },
      "properties_json"_a, nb::kw_only(), "op"_a, "x"_a, "w"_a, "y"_a, "stride"_a, "pre_padding"_a,
      "post_padding"_a, "dilation"_a, "flip"_a, "dtype"_a, "allow_tf32"_a, "workspace_limit"_a,
      "alignment"_a = kFullAlignment,
      "A plan for a GPU described by cuDNN's JSON, which need not exist: for tests of planning.");

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
      .def_ro("evictions", &CacheInfo::evictions)
      .def_ro("size", &CacheInfo::size)
      .def_ro("capacity", &CacheInfo::capacity);
  m.def("cache_info", &PlanCacheInfo, "Counters of the process-wide plan cache.");
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
