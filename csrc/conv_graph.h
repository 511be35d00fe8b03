// SPDX-License-Identifier: Apache-2.0
//
// Included by planner.cc alone: cudnn_frontend takes most of a minute to compile.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "error.h"
#include "frontend.h"
#include "host_reference.h"
#include "known_faults.h"
#include "planner.h"

namespace jaxcudnn {

enum Uid : int64_t { kX = 1, kW = 2, kY = 3, kResidual = 4, kBias = 5 };

// As many recommendations make it needless to ask for more.
inline constexpr size_t kSeveral = 8;
// Candidates that are timed: with few channels more, since the best may be any engine's; and how
// many of cuDNN's recommendations come before the engines' defaults.
inline constexpr size_t kMost = 24, kMostOfFewChannels = 48, kFirst = 16;
// Fewer, and dilation, leave cuDNN's recommendations poor.
inline constexpr int64_t kFewChannels = 8;
// Bytes that any plan may need to be worth measuring; more only if cuDNN's first needs about as
// much, or if channels are few, where the fast plans spread them out to many.
inline constexpr int64_t kOrdinaryWorkspace = int64_t{64} << 20;
inline constexpr int64_t kAboutAsMuch = 2;  // times
inline constexpr int64_t kSpreadOut = 4;    // times what the arrays take
// What every plan's name begins with, before the engine's number.
inline constexpr std::string_view kEngine = "eng";
// Right for anything and fast for little: cuDNN puts it first where it is the best.
inline constexpr std::string_view kGenericEngine = "eng0";

// It takes about a millisecond for as many.
inline constexpr double kFewProducts = 1 << 27;
// Often the fastest for filter gradients of few channels in TF32, and recommended last.
inline constexpr std::string_view kUnusualWgradEngine = "eng30";

struct FoundPlan {
  std::shared_ptr<fe::ExecutionPlan> plan;
  std::string name;
};

/// A cudnn_frontend graph of one convolution, with its list of candidate plans.
class ConvGraph : public fe::graph::Graph {
  using Source = void (ConvGraph::*)();

 public:
  ConvGraph(const Problem& problem, DeviceProperties properties, const Target& target)
      : problem_(problem), target_(target) {
    set_io_data_type(jaxcudnn::ToFrontend(problem.spec.dtype));
    set_intermediate_data_type(Accumulator(problem.spec.dtype));
    set_compute_data_type(Accumulator(problem.spec.dtype));
    set_device_properties(std::move(properties));
    AddOperation();
    CheckFrontend(validate(), "validating the cuDNN graph");
    CheckFrontend(build_operation_graph(), "building the cuDNN graph");
    deselect_workspace_greater_than(problem.workspace_limit);
  }

  /// Why cuDNN refused what it refused last.
  [[nodiscard]] const std::string& reason() const { return reason_; }

  /// The first candidate that may be used and can be built.
  std::optional<FoundPlan> First() {
    for (Source append : Sources()) {
      for (size_t index : Append(append)) {
        if (auto found = Built(index)) return found;
      }
    }
    return std::nullopt;
  }

  /// The candidate of this name, if it may be used and can be built.
  std::optional<FoundPlan> Named(std::string_view name) {
    for (Source append : Sources()) {
      for (size_t index : Append(append)) {
        if (NameOf(index) == name) return Built(index);
      }
    }
    return std::nullopt;
  }

  /// The names of all candidates that may be used.
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    for (Source append : Sources()) {
      for (size_t index : Append(append)) names.push_back(NameOf(index));
    }
    return names;
  }

  /// Candidates that can be built, those compiled at run time last. Unless `everything` is asked
  /// for, no more than are worth timing, and left out, if there are others, are the generic engine
  /// where it might take long, one that has to be compiled, and one whose workspace is out of
  /// proportion (docs/decisions.md).
  std::vector<FoundPlan> All(bool everything) {
    std::vector<FoundPlan> found = Collected(everything);
    if (!everything && !found.empty()) Sift(found);
    const std::string_view promising = Promising();
    std::stable_partition(found.begin(), found.end(),
                          [&](const FoundPlan& plan) { return EngineOf(plan.name) == promising; });
    return found;
  }

  /// The first candidate that is compiled at run time, which takes from 0.3 to 3 seconds.
  std::optional<FoundPlan> FirstCompiled() {
    for (Source append : Sources()) {
      for (size_t index : Append(append)) {
        if (!IsCompiledAtRunTime(index)) continue;
        if (auto found = Built(index)) return found;
      }
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] bool HasFewChannels() const { return FewestChannels(problem_.spec) < kFewChannels; }

  /// Whether cuDNN's recommendations are good.
  [[nodiscard]] bool IsUsual() const { return !HasFewChannels() && !IsDilated(problem_.spec); }

  /// cuDNN's first recommendations, those of its second heuristic if channels are few; the engines
  /// that it recommended, or all if the convolution is not usual or has few, with their own
  /// defaults; then the other recommendations.
  std::vector<FoundPlan> Collected(bool everything) {
    std::vector<FoundPlan> found;
    std::vector<size_t> later, compiled_at_run_time;
    size_t most = HasFewChannels() ? kMostOfFewChannels : kMost;
    if (everything) most = std::numeric_limits<size_t>::max();
    const auto build = [&](size_t index) {
      if (found.size() >= most) return;
      if (auto plan = Built(index)) found.push_back(*std::move(plan));
    };
    const auto add = [&](Source append) {
      for (size_t index : Append(append)) {
        if (IsCompiledAtRunTime(index)) {
          compiled_at_run_time.push_back(index);
        } else if (append == &ConvGraph::AppendPreferred && found.size() >= kFirst) {
          later.push_back(index);
        } else {
          build(index);
        }
      }
    };
    for (Source append : Sources()) {
      add(append);
      if (!everything && IsUsual() && found.size() >= kSeveral) {
        add(&ConvGraph::AppendSeenEngines);
        break;
      }
    }
    for (size_t index : later) build(index);
    for (size_t index : compiled_at_run_time) {
      if (everything || found.empty()) build(index);
    }
    return found;
  }

  /// Drops what is not worth timing. After the first come those that need no more workspace than
  /// any plan may: where others need much, each run of them is long, and the budget may not last.
  void Sift(std::vector<FoundPlan>& found) const {
    const auto workspace = [](const FoundPlan& plan) { return plan.plan->getWorkspaceSize(); };
    int64_t most = std::max(kAboutAsMuch * workspace(found[0]), kOrdinaryWorkspace);
    if (!IsUsual()) most = std::max(most, kSpreadOut * BytesOf(problem_.spec));
    const bool suits_generic =
        HasOneChannelAGroup(problem_.spec) || Products(problem_.spec) <= kFewProducts;
    const auto is_unpromising = [&](const FoundPlan& plan) {
      return (EngineOf(plan.name) == kGenericEngine && !suits_generic) || workspace(plan) > most;
    };
    const auto is_ordinary = [&](const FoundPlan& plan) {
      return workspace(plan) <= kOrdinaryWorkspace;
    };
    const auto second = found.begin() + 1;
    found.erase(std::remove_if(second, found.end(), is_unpromising), found.end());
    std::stable_partition(second, found.end(), is_ordinary);
  }

  /// The engine that is timed first, since the budget may not last for all; empty if there is none.
  [[nodiscard]] std::string_view Promising() const {
    if (HasOneChannelAGroup(problem_.spec)) return kGenericEngine;
    return !IsUsual() && problem_.spec.op == ConvOp::kWgrad ? kUnusualWgradEngine : "";
  }

  void AddOperation() {
    const ConvSpec& spec = problem_.spec;
    switch (spec.op) {
      case ConvOp::kFprop: {
        Tensor x = Operand(kX, spec.x), w = Operand(kW, spec.w);
        Finish(conv_fprop(x, w, WithGeometry(fe::graph::Conv_fprop_attributes())), kY, spec.y);
        return;
      }
      case ConvOp::kDgrad: {
        Tensor dy = Operand(kY, spec.y), w = Operand(kW, spec.w);
        Finish(conv_dgrad(dy, w, WithGeometry(fe::graph::Conv_dgrad_attributes())), kX, spec.x);
        return;
      }
      case ConvOp::kWgrad: {
        Tensor dy = Operand(kY, spec.y), x = Operand(kX, spec.x);
        Finish(conv_wgrad(dy, x, WithGeometry(fe::graph::Conv_wgrad_attributes())), kW, spec.w);
        return;
      }
    }
  }

  /// Adds the epilogue: the residual before the bias, as the precompiled engines have it.
  void Finish(Tensor sums, Uid uid, const std::vector<int64_t>& sizes) {
    const Epilogue& epilogue = problem_.spec.epilogue;
    const auto set_sizes = [&](const Tensor& tensor) {
      tensor->set_dim(sizes).set_stride(Strides(problem_.spec, sizes));
    };
    const auto next = [&](Tensor tensor) {
      set_sizes(sums);  // which is not the result, and stays in the accumulator's type
      sums = std::move(tensor);
    };
    const auto add = [&](Uid operand) {
      const bool is_bias = operand == kBias;
      Tensor addend =
          Operand(operand, SizesOf(problem_.spec, is_bias ? jaxcudnn::Operand::kBias
                                                          : jaxcudnn::Operand::kResidual));
      next(pointwise(sums, addend, Pointwise().set_mode(fe::PointwiseMode_t::ADD)));
    };
    if (epilogue.residual) add(kResidual);
    if (epilogue.bias) add(kBias);
    if (epilogue.activation != Activation::kNone) {
      next(pointwise(sums, ToFrontend(epilogue.activation)));
    }
    set_sizes(sums);
    sums->set_output(true)
        .set_uid(uid)
        .set_data_type(jaxcudnn::ToFrontend(problem_.spec.dtype))
        .set_alignment(problem_.alignment);
  }

  [[nodiscard]] fe::graph::Pointwise_attributes Pointwise() const {
    fe::graph::Pointwise_attributes attributes;
    attributes.set_compute_data_type(Accumulator(problem_.spec.dtype));
    return attributes;
  }

  [[nodiscard]] fe::graph::Pointwise_attributes ToFrontend(Activation activation) const {
    using Mode = fe::PointwiseMode_t;
    switch (activation) {
      case Activation::kNone:
        break;
      case Activation::kRelu:
        return Pointwise().set_mode(Mode::RELU_FWD);
      case Activation::kLeakyRelu:
        return Pointwise().set_mode(Mode::RELU_FWD).set_relu_lower_clip_slope(kLeak);
      case Activation::kGelu:
        return Pointwise().set_mode(Mode::GELU_FWD);
      case Activation::kGeluTanh:
        return Pointwise().set_mode(Mode::GELU_APPROX_TANH_FWD);
      case Activation::kSilu:
        return Pointwise().set_mode(Mode::SWISH_FWD).set_swish_beta(1);
      case Activation::kElu:
        return Pointwise().set_mode(Mode::ELU_FWD).set_elu_alpha(1);
      case Activation::kSoftplus:
        return Pointwise().set_mode(Mode::SOFTPLUS_FWD).set_softplus_beta(1);
      case Activation::kTanh:
        return Pointwise().set_mode(Mode::TANH_FWD);
      case Activation::kSigmoid:
        return Pointwise().set_mode(Mode::SIGMOID_FWD);
    }
    throw Error(ErrorCode::kInternal, "an Activation is missing from ToFrontend");
  }

  template <typename Attributes>
  Attributes WithGeometry(Attributes attributes) const {
    const ConvSpec& spec = problem_.spec;
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
                      .set_stride(Strides(problem_.spec, sizes))
                      .set_data_type(jaxcudnn::ToFrontend(problem_.spec.dtype))
                      .set_alignment(problem_.alignment));
  }

  /// Where candidates come from, the best first. Below full alignment it is cuDNN's generic engine
  /// alone: others say that they support it and then read in vectors, which faults (engine 67 for
  /// float32 filter gradients, cuDNN 9.19).
  [[nodiscard]] std::vector<Source> Sources() const {
    if (problem_.alignment < kFullAlignment) return {&ConvGraph::AppendGeneric};
    std::vector<Source> sources = {&ConvGraph::AppendPreferred, &ConvGraph::AppendFallback,
                                   &ConvGraph::AppendEveryEngine};
    // It takes five times as long to ask, and for depthwise convolutions knows no better.
    const bool has_more = HasFewChannels() && !HasOneChannelAGroup(problem_.spec);
    if (has_more) sources.insert(sources.begin() + 1, &ConvGraph::AppendPredicted);
    return sources;
  }

  void AppendGeneric() { AppendEngine(0); }
  void AppendPreferred() { AppendHeuristic(fe::HeurMode_t::A); }
  void AppendPredicted() { AppendHeuristic(fe::HeurMode_t::B); }
  void AppendFallback() { AppendHeuristic(fe::HeurMode_t::FALLBACK); }

  void AppendHeuristic(fe::HeurMode_t mode) {
    // An empty list is reported as a failure; the next source may still have something.
    if (fe::error_t status = create_execution_plans({mode}); status.is_bad()) {
      reason_ = status.get_message();
    }
  }

  /// Filters can empty both lists although fitting engines exist (float32 without TF32, small
  /// alignments), so the last resort is to ask for each engine by its number.
  void AppendEveryEngine() {
    int64_t count = 0;
    CheckFrontend(get_engine_count(count), "counting cuDNN's engines");
    for (int64_t id = 0; id < count; ++id) AppendEngine(id);
  }

  /// Engines that were recommended with certain knobs, with their own defaults: now and then
  /// better.
  void AppendSeenEngines() {
    std::set<int64_t> ids;
    for (const std::string& name : seen_) ids.insert(std::stoll(name.substr(kEngine.size())));
    for (int64_t id : ids) AppendEngine(id);
  }

  void AppendEngine(int64_t id) {
    if (fe::error_t status = create_execution_plan(id, {}); status.is_bad()) {
      reason_ = status.get_message();
    }
  }

  /// Asks a source for candidates and gives those that have not been seen under the same name and
  /// may be used, the ones that need run-time compilation (seconds each) last.
  std::vector<size_t> Append(Source append) {
    const auto first = static_cast<size_t>(get_execution_plan_count());
    (this->*append)();
    std::vector<size_t> indices;
    const auto count = static_cast<size_t>(get_execution_plan_count());
    for (size_t index = first; index < count; ++index) {
      const std::string name = NameOf(index);
      if (seen_.insert(name).second && Allowed(index, name)) indices.push_back(index);
    }
    std::stable_partition(indices.begin(), indices.end(),
                          [this](size_t index) { return !IsCompiledAtRunTime(index); });
    return indices;
  }

  [[nodiscard]] bool Allowed(size_t index, const std::string& name) {
    const PlanOptions& options = problem_.options;
    const std::vector<fe::NumericalNote_t>& notes = plans.numeric_notes[index];
    if (!NumericsAllowed(notes) || Lists(options.exclude_engines, EngineOf(name)) ||
        (!options.allow_runtime_compilation && IsCompiledAtRunTime(index))) {
      return false;
    }
    const bool tensor_cores =
        std::count(notes.begin(), notes.end(), fe::NumericalNote_t::TENSOR_CORE) > 0;
    const Demands demands{options.deterministic, options.allow_reduced_precision_reduction};
    const auto* fault = FaultOf(problem_.spec, {name, tensor_cores}, target_, demands);
    if (fault) reason_ = "a known fault: " + Summary(TextOf(*fault));
    return fault == nullptr;
  }

  [[nodiscard]] bool IsCompiledAtRunTime(size_t index) const {
    const auto& notes = plans.behavior_notes[index];
    return std::find(notes.begin(), notes.end(), fe::BehaviorNote_t::RUNTIME_COMPILATION) !=
           notes.end();
  }

  std::optional<FoundPlan> Built(size_t index) {
    fe::error_t status = build_plan_at_index(static_cast<int64_t>(index));
    if (status.is_bad()) {
      reason_ = status.get_message();
      return std::nullopt;
    }
    auto plan = plans.execution_plans[index];
    if (plan->getWorkspaceSize() <= problem_.workspace_limit) return FoundPlan{plan, NameOf(index)};
    reason_ = "a plan turned out to need more workspace than its description said";
    return std::nullopt;
  }

  [[nodiscard]] std::string NameOf(size_t index) const {
    std::string name;
    CheckFrontend(get_plan_name_at_index(static_cast<int64_t>(index), name), "naming a plan");
    return name;
  }

  /// Products are summed in float32, of operands as they are; TF32 only where the caller allows it.
  /// Transform methods (FFT, Winograd) are exact neither for integers nor in their error bound.
  [[nodiscard]] bool NumericsAllowed(const std::vector<fe::NumericalNote_t>& notes) const {
    const bool strict = problem_.spec.dtype == DataType::kFloat32 && !problem_.spec.allow_tf32;
    for (fe::NumericalNote_t note : notes) {
      switch (note) {
        case fe::NumericalNote_t::REDUCED_PRECISION_REDUCTION:
          if (!problem_.options.allow_reduced_precision_reduction) return false;
          break;
        case fe::NumericalNote_t::NONDETERMINISTIC:
          if (problem_.options.deterministic) return false;
          break;
        case fe::NumericalNote_t::DOWN_CONVERT_INPUTS:
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

  const Problem& problem_;
  const Target target_;
  std::string reason_;
  std::unordered_set<std::string> seen_;
};

}  // namespace jaxcudnn
