// SPDX-License-Identifier: Apache-2.0
//
// The only file that includes cudnn_frontend, which takes most of a minute to compile.
#include "planner.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "error.h"
#include "known_faults.h"
#include "libraries.h"
#include "version_text.h"

// cudnn_frontend calls cuDNN through this handle, which Frontend() sets before the first call.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace jaxcudnn {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using DeviceProperties = std::shared_ptr<const fe::DeviceProperties>;

enum Uid : int64_t { kX = 1, kW = 2, kY = 3 };

// cuDNN's messages can run to many lines; the first few hundred characters name the cause.
constexpr size_t kLongestReason = 400;

void CheckFrontend(fe::error_t status, const char* what) {
  if (status.is_good()) return;
  const bool unsupported = status.get_code() == fe::error_code_t::GRAPH_NOT_SUPPORTED;
  throw Error(unsupported ? ErrorCode::kUnsupported : ErrorCode::kInternal,
              std::string(what) + " failed: " + status.get_message().substr(0, kLongestReason));
}

void LoadFrontend() {
  static const bool loaded = [] {
    fe::cudnn_dlhandle = Cudnn().handle;
    return true;
  }();
  (void)loaded;
}

fe::DataType_t ToFrontend(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return fe::DataType_t::HALF;
    case DataType::kBFloat16:
      return fe::DataType_t::BFLOAT16;
    case DataType::kFloat32:
      return fe::DataType_t::FLOAT;
    case DataType::kFloat64:
      return fe::DataType_t::DOUBLE;
  }
  throw Error(ErrorCode::kInternal, "a DataType is missing from ToFrontend");
}

/// What products are summed in.
fe::DataType_t Accumulator(DataType type) {
  return type == DataType::kFloat64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
}

/// Packed strides of N C spatial... sizes whose memory order is N spatial... C. The same rule gives
/// K window... C for filters, the only filter order that cuDNN computes correctly by strides: given
/// the strides of H W I O it reads the bytes as O H W I.
std::vector<int64_t> ChannelsLastStrides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  strides[1] = 1;
  int64_t stride = sizes[1];
  for (size_t axis = sizes.size() - 1; axis >= 2; --axis) {
    strides[axis] = stride;
    stride *= sizes[axis];
  }
  strides[0] = stride;
  return strides;
}

struct FoundPlan {
  std::shared_ptr<fe::ExecutionPlan> plan;
  std::string name;
};

/// A cudnn_frontend graph of one convolution, with its list of candidate plans.
class ConvGraph : public fe::graph::Graph {
  using Source = void (ConvGraph::*)(std::string& reason);

 public:
  ConvGraph(const PlanRequest& request, DeviceProperties properties, const Target& target)
      : request_(request), target_(target) {
    set_io_data_type(ToFrontend(request.spec.dtype));
    set_intermediate_data_type(Accumulator(request.spec.dtype));
    set_compute_data_type(Accumulator(request.spec.dtype));
    set_device_properties(std::move(properties));
    AddOperation();
    CheckFrontend(validate(), "validating the cuDNN graph");
    CheckFrontend(build_operation_graph(), "building the cuDNN graph");
    deselect_workspace_greater_than(request.workspace_limit);
  }

  /// The first candidate that may be used and can be built, or none with the last `reason`.
  std::optional<FoundPlan> FirstPlan(std::string& reason) {
    for (Source append : Sources()) {
      const auto first = static_cast<size_t>(get_execution_plan_count());
      (this->*append)(reason);
      for (size_t index : Acceptable(first, reason)) {
        fe::error_t status = build_plan_at_index(static_cast<int64_t>(index));
        if (status.is_bad()) {
          reason = status.get_message();
          continue;
        }
        auto plan = plans.execution_plans[index];
        if (plan->getWorkspaceSize() <= request_.workspace_limit)
          return FoundPlan{plan, NameOf(index)};
        reason = "a plan turned out to need more workspace than its description said";
      }
    }
    return std::nullopt;
  }

 private:
  void AddOperation() {
    const ConvSpec& spec = request_.spec;
    switch (spec.op) {
      case ConvOp::kFprop: {
        Tensor x = Operand(kX, spec.x), w = Operand(kW, spec.w);
        Result(conv_fprop(x, w, WithGeometry(fe::graph::Conv_fprop_attributes())), kY, spec.y);
        return;
      }
      case ConvOp::kDgrad: {
        Tensor dy = Operand(kY, spec.y), w = Operand(kW, spec.w);
        Result(conv_dgrad(dy, w, WithGeometry(fe::graph::Conv_dgrad_attributes())), kX, spec.x);
        return;
      }
      case ConvOp::kWgrad: {
        Tensor dy = Operand(kY, spec.y), x = Operand(kX, spec.x);
        Result(conv_wgrad(dy, x, WithGeometry(fe::graph::Conv_wgrad_attributes())), kW, spec.w);
        return;
      }
    }
  }

  template <typename Attributes>
  Attributes WithGeometry(Attributes attributes) const {
    const ConvSpec& spec = request_.spec;
    attributes.set_pre_padding(spec.pre_padding)
        .set_post_padding(spec.post_padding)
        .set_stride(spec.stride)
        .set_dilation(spec.dilation)
        .set_convolution_mode(spec.flip ? fe::ConvolutionMode_t::CONVOLUTION
                                        : fe::ConvolutionMode_t::CROSS_CORRELATION);
    return attributes;
  }

  Tensor Operand(Uid uid, const std::vector<int64_t>& sizes) {
    return tensor(fe::graph::Tensor_attributes()
                      .set_uid(uid)
                      .set_dim(sizes)
                      .set_stride(ChannelsLastStrides(sizes))
                      .set_data_type(ToFrontend(request_.spec.dtype))
                      .set_alignment(request_.alignment));
  }

  void Result(const Tensor& result, Uid uid, const std::vector<int64_t>& sizes) {
    result->set_output(true)
        .set_uid(uid)
        .set_dim(sizes)
        .set_stride(ChannelsLastStrides(sizes))
        .set_data_type(ToFrontend(request_.spec.dtype))
        .set_alignment(request_.alignment);
  }

  /// Where candidates come from, the best first. Below full alignment it is cuDNN's generic engine
  /// alone: others say that they support it and then read in vectors, which faults (engine 67 for
  /// float32 filter gradients, cuDNN 9.19).
  [[nodiscard]] std::vector<Source> Sources() const {
    if (request_.alignment < kFullAlignment) return {&ConvGraph::AppendGeneric};
    return {&ConvGraph::AppendPreferred, &ConvGraph::AppendFallback, &ConvGraph::AppendEveryEngine};
  }

  void AppendGeneric(std::string& reason) { AppendEngine(0, reason); }
  void AppendPreferred(std::string& reason) { AppendHeuristic(fe::HeurMode_t::A, reason); }
  void AppendFallback(std::string& reason) { AppendHeuristic(fe::HeurMode_t::FALLBACK, reason); }

  void AppendHeuristic(fe::HeurMode_t mode, std::string& reason) {
    // An empty list is reported as a failure; the next source may still have something.
    if (fe::error_t status = create_execution_plans({mode}); status.is_bad()) {
      reason = status.get_message();
    }
  }

  /// Filters can empty both lists although fitting engines exist (float32 without TF32, small
  /// alignments), so the last resort is to ask for each engine by its number.
  void AppendEveryEngine(std::string& reason) {
    int64_t count = 0;
    CheckFrontend(get_engine_count(count), "counting cuDNN's engines");
    for (int64_t id = 0; id < count; ++id) AppendEngine(id, reason);
  }

  void AppendEngine(int64_t id, std::string& reason) {
    if (fe::error_t status = create_execution_plan(id, {}); status.is_bad()) {
      reason = status.get_message();
    }
  }

  /// The candidates from index `first` on that have not been seen under the same name and whose
  /// notes are allowed, those that need run-time compilation (seconds each) last.
  std::vector<size_t> Acceptable(size_t first, std::string& reason) {
    std::vector<size_t> indices;
    const auto count = static_cast<size_t>(get_execution_plan_count());
    for (size_t index = first; index < count; ++index) {
      const std::string name = NameOf(index);
      const std::vector<fe::NumericalNote_t>& notes = plans.numeric_notes[index];
      if (!seen_.insert(name).second || !NumericsAllowed(notes)) continue;
      const bool tensor_cores =
          std::count(notes.begin(), notes.end(), fe::NumericalNote_t::TENSOR_CORE) > 0;
      const Demands demands;
      if (const auto* fault = FaultOf(request_.spec, {name, tensor_cores}, target_, demands)) {
        reason = "a known fault: " + Summary(TextOf(*fault));
        continue;
      }
      indices.push_back(index);
    }
    std::stable_partition(indices.begin(), indices.end(), [this](size_t index) {
      const auto& notes = plans.behavior_notes[index];
      return std::find(notes.begin(), notes.end(), fe::BehaviorNote_t::RUNTIME_COMPILATION) ==
             notes.end();
    });
    return indices;
  }

  [[nodiscard]] std::string NameOf(size_t index) const {
    std::string name;
    CheckFrontend(get_plan_name_at_index(static_cast<int64_t>(index), name), "naming a plan");
    return name;
  }

  /// Products are summed in float32, of operands as they are; TF32 only where the caller allows it.
  /// Transform methods (FFT, Winograd) are exact neither for integers nor in their error bound.
  [[nodiscard]] bool NumericsAllowed(const std::vector<fe::NumericalNote_t>& notes) const {
    const bool strict = request_.spec.dtype == DataType::kFloat32 && !request_.spec.allow_tf32;
    for (fe::NumericalNote_t note : notes) {
      switch (note) {
        case fe::NumericalNote_t::DOWN_CONVERT_INPUTS:
        case fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION:
        case fe::NumericalNote_t::FFT:
        case fe::NumericalNote_t::WINOGRAD:
        case fe::NumericalNote_t::WINOGRAD_TILE_4x4:
        case fe::NumericalNote_t::WINOGRAD_TILE_6x6:
        case fe::NumericalNote_t::WINOGRAD_TILE_13x13:
          return false;
        case fe::NumericalNote_t::TENSOR_CORE:
          if (strict) return false;
          break;
        default:
          break;
      }
    }
    return true;
  }

  const PlanRequest& request_;
  const Target target_;
  std::unordered_set<std::string> seen_;
};

std::array<int64_t, 3> UidsOf(ConvOp op) {
  switch (op) {
    case ConvOp::kFprop:
      return {kX, kW, kY};
    case ConvOp::kDgrad:
      return {kY, kW, kX};
    case ConvOp::kWgrad:
      return {kX, kY, kW};
  }
  throw Error(ErrorCode::kInternal, "a ConvOp is missing from UidsOf");
}

/// A table of operand addresses for one execution. cuDNN refuses to change one that is finished, so
/// each execution makes its own; that is part of the price of an enqueue.
class VariantPack {
 public:
  VariantPack(const std::array<int64_t, 3>& uids, const Buffers& buffers, void* workspace)
      : descriptor_(Create()) {
    Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids.size(), uids.data());
    Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, buffers.size(), buffers.data());
    Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    CheckCudnn(Cudnn().finalize(get()), "finalizing a variant pack");
  }

  [[nodiscard]] cudnnBackendDescriptor_t get() const { return descriptor_.get(); }

 private:
  static cudnnBackendDescriptor_t Create() {
    cudnnBackendDescriptor_t descriptor = nullptr;
    CheckCudnn(Cudnn().create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &descriptor),
               "creating a variant pack");
    return descriptor;
  }

  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, size_t count,
           const void* values) {
    CheckCudnn(Cudnn().set_attribute(get(), name, type, static_cast<int64_t>(count), values),
               "filling a variant pack");
  }

  struct Destroy {
    void operator()(void* descriptor) const { (void)Cudnn().destroy_descriptor(descriptor); }
  };
  std::unique_ptr<void, Destroy> descriptor_;
};

/// Executes through the backend directly, past the frontend's maps and shared pointers, which cost
/// more host time a call than all of this extension.
class BackendPlan final : public Plan {
 public:
  BackendPlan(FoundPlan found, DeviceProperties properties, ConvOp op)
      : plan_(std::move(found.plan)), properties_(std::move(properties)), uids_(UidsOf(op)) {
    name_ = std::move(found.name);
    workspace_size_ = plan_->getWorkspaceSize();
    for (cudnnBackendNumericalNote_t note : plan_->getAllNumericNotes()) {
      notes_.push_back(fe::to_string(note));
    }
    for (cudnnBackendBehaviorNote_t note : plan_->getAllBehaviorNotes()) {
      notes_.push_back(fe::to_string(note));
    }
  }

  void Execute(cudnnHandle_t handle, const Buffers& buffers, void* workspace) const override {
    const VariantPack pack(uids_, buffers, workspace);
    CheckCudnn(Cudnn().execute(handle, plan_->get_raw_desc(), pack.get()),
               "executing a convolution");
  }

 private:
  std::shared_ptr<fe::ExecutionPlan> plan_;
  DeviceProperties properties_;  // outlives the plan that was made from it
  std::array<int64_t, 3> uids_;
};

std::string Describe(const PlanRequest& request) {
  return TextOf(request.spec) + ", operands aligned to " + std::to_string(request.alignment) +
         " bytes";
}

std::shared_ptr<const Plan> Build(const PlanRequest& request, const DeviceProperties& properties,
                                  const Target& target) {
  std::string reason;
  if (auto found = ConvGraph(request, properties, target).FirstPlan(reason)) {
    return std::make_shared<BackendPlan>(std::move(*found), properties, request.spec.op);
  }

  PlanRequest unlimited = request;
  unlimited.workspace_limit = std::numeric_limits<int64_t>::max();
  std::string ignored;
  if (auto larger = ConvGraph(unlimited, properties, target).FirstPlan(ignored)) {
    throw Error(ErrorCode::kResourceExhausted,
                "every cuDNN plan for this convolution needs more workspace than the " +
                    std::to_string(request.workspace_limit) + " bytes given; " + larger->name +
                    " needs " + std::to_string(larger->plan->getWorkspaceSize()) +
                    " bytes. The convolution: " + Describe(request));
  }
  throw Error(ErrorCode::kUnsupported,
              "cuDNN " + VersionText(Cudnn().version) + " has no plan for this convolution: " +
                  Describe(request) + ". cuDNN's last reason: " + reason.substr(0, kLongestReason));
}

DeviceProperties PropertiesOf(int device) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<int, DeviceProperties>;
  std::lock_guard<std::mutex> lock(*mutex);
  DeviceProperties& entry = (*known)[device];
  if (!entry) {
    auto properties = std::make_shared<fe::DeviceProperties>();
    CheckFrontend(properties->set_device_id(device).build(), "reading the device's properties");
    entry = std::move(properties);
  }
  return entry;
}

}  // namespace

std::shared_ptr<const Plan> BuildPlan(const PlanRequest& request) {
  LoadFrontend();
  DeviceScope scope(request.device);
  return Build(request, PropertiesOf(request.device), TargetOf(request.device));
}

std::shared_ptr<const Plan> BuildPlanFromProperties(const PlanRequest& request,
                                                    const std::string& properties_json) {
  LoadFrontend();
  auto properties = std::make_shared<fe::DeviceProperties>();
  CheckFrontend(properties->deserialize({properties_json.begin(), properties_json.end()}),
                "reading the device properties given as JSON");
  // Its compute capability is left unknown, so that the faults of every GPU are avoided.
  return Build(request, properties, {0, Cudnn().version, CublasLtVersion()});
}

}  // namespace jaxcudnn
