// SPDX-License-Identifier: Apache-2.0
#include "known_faults.h"

#include <algorithm>
#include <limits>

#include "version_text.h"

namespace jaxcudnn {
namespace {

bool Always(const ConvSpec&) { return true; }

bool AsymmetricPadding(const ConvSpec& spec) { return spec.pre_padding != spec.post_padding; }

bool ThreeSpatialDimensions(const ConvSpec& spec) { return spec.spatial_rank() == 3; }

bool LargeDepthwise(const ConvSpec& spec) {
  const auto elements = [](const std::vector<int64_t>& sizes) {
    int64_t product = 1;  // Validate has bounded it
    for (int64_t size : sizes) product *= size;
    return product;
  };
  return spec.w[1] == 1 && spec.x[1] > 1 &&
         std::max(elements(spec.x), elements(spec.y)) > std::numeric_limits<int32_t>::max();
}

constexpr Condition kAlways = {"any", &Always};
constexpr Condition kAsymmetricPadding = {"low and high padding differ", &AsymmetricPadding};
constexpr Condition kThreeSpatialDimensions = {"three spatial dimensions", &ThreeSpatialDimensions};
constexpr Condition kLargeDepthwise = {"depthwise, x or y of more than 2^31 - 1 elements",
                                       &LargeDepthwise};

constexpr VersionRange kAny = {};

const std::vector<KnownFault>& Table() {
  // docs/decisions.md says how the rows without a version were found; benchmarks/plan_survey.py
  // finds more. Engines have other numbers in other operations, and may in other versions.
  static const auto* table = new std::vector<KnownFault>{
      // clang-format off
      // op, engine, knob, on tensor cores alone,
      //     sm, cuDNN, cuBLASLt, dtypes, where,
      //     what is wrong, source
      {ConvOp::kWgrad, "eng1", "", false,
       kAny, kAny, kAny, {}, kAsymmetricPadding,
       Fault::kWrongNumbers, "docs/decisions.md"},
      {ConvOp::kWgrad, "eng20", "", false,
       kAny, kAny, kAny, {}, kAsymmetricPadding,
       Fault::kWrongNumbers, "docs/decisions.md"},
      {ConvOp::kWgrad, "eng61", "", false,
       kAny, kAny, kAny, {DataType::kFloat16, DataType::kBFloat16}, kAlways,
       Fault::kRoundsPartialSums, "docs/decisions.md"},
      {ConvOp::kWgrad, "eng47", "k0", false,
       kAny, kAny, kAny, {DataType::kFloat16, DataType::kBFloat16}, kAlways,
       Fault::kRoundsPartialSums, "docs/decisions.md"},
      {ConvOp::kWgrad, "eng62", "k25=1", false,
       kAny, kAny, kAny, {DataType::kFloat16, DataType::kBFloat16}, kAlways,
       Fault::kRoundsPartialSums, "docs/decisions.md"},
      {ConvOp::kFprop, "eng4", "", false,
       kAny, kAny, kAny, {}, kAlways,
       Fault::kTransforms, "docs/decisions.md"},
      {ConvOp::kDgrad, "eng5", "", false,
       kAny, kAny, kAny, {}, kAlways,
       Fault::kTransforms, "docs/decisions.md"},
      {ConvOp::kWgrad, "eng17", "", false,
       kAny, kAny, kAny, {}, kAlways,
       Fault::kTransforms, "docs/decisions.md"},
      // The reporters name no engine.
      {std::nullopt, "", "", true,
       kAny, {91002, 91600}, kAny, {DataType::kFloat32}, kThreeSpatialDimensions,
       Fault::kWrongNumbers, "https://github.com/pytorch/pytorch/pull/167024"},
      // So large an array comes here only if it cannot be cut.
      {std::nullopt, "", "", false,
       kAny, {91001, 91500}, kAny, {}, kLargeDepthwise,
       Fault::kWrongNumbers, "https://github.com/pytorch/pytorch/pull/168364"},
      {ConvOp::kFprop, "eng5", "", false,
       {86, 87}, {92301, 92400}, kAny, {}, kAlways,
       Fault::kNotDeterministic, "https://github.com/pytorch/pytorch/pull/189207"},
      // The reporters name no operation.
      {std::nullopt, "eng58", "", false,
       {120, 121}, kAny, {0, 130601}, {}, kAlways,
       Fault::kIllegalAccess, "https://github.com/pytorch/pytorch/pull/191701"},
      {std::nullopt, "eng63", "", false,
       {120, 121}, kAny, {0, 130601}, {}, kAlways,
       Fault::kIllegalAccess, "https://github.com/pytorch/pytorch/pull/191701"},
      // clang-format on
  };
  return *table;
}

/// Whether a plan's name has the knob: "k0" or "k0=14" in "eng47_k0=14_k2=5". No knob: yes.
bool HasKnob(std::string_view name, std::string_view knob) {
  if (knob.empty()) return true;
  const std::string_view rest = name.substr(std::min(name.find('_'), name.size()));
  const size_t at = (std::string(rest) + "_")
                        .find("_" + std::string(knob) + (knob.find('=') == knob.npos ? "=" : "_"));
  return at != std::string::npos;
}

bool MayContain(const VersionRange& range, size_t version) {
  return version == 0 || (version >= range.first && (range.before == 0 || version < range.before));
}

bool MayApply(const KnownFault& row, const Target& target) {
  return MayContain(row.sm, target.sm) && MayContain(row.cudnn, target.cudnn) &&
         MayContain(row.cublaslt, target.cublaslt);
}

bool Matters(Fault fault, const Demands& demands) {
  switch (fault) {
    case Fault::kRoundsPartialSums:
      return !demands.allow_reduced_precision_reduction;
    case Fault::kNotDeterministic:
      return demands.deterministic;
    case Fault::kWrongNumbers:
    case Fault::kTransforms:
    case Fault::kIllegalAccess:
      return true;
  }
  throw Error(ErrorCode::kInternal, "a Fault is missing from Matters");
}

std::string_view NameOf(Fault fault) {
  switch (fault) {
    case Fault::kWrongNumbers:
      return "wrong numbers";
    case Fault::kTransforms:
      return "transforms by FFT, which is not exact";
    case Fault::kRoundsPartialSums:
      return "rounds partial sums";
    case Fault::kNotDeterministic:
      return "not deterministic";
    case Fault::kIllegalAccess:
      return "illegal memory access";
  }
  throw Error(ErrorCode::kInternal, "a Fault is missing from NameOf");
}

/// "any", "86", ">= 9.10.2, < 9.16.0" and so on; `text` says one number.
template <typename Text>
std::string RangeText(const VersionRange& range, const Text& text) {
  if (range.first == 0 && range.before == 0) return "any";
  if (range.first == 0) return "< " + text(range.before);
  const std::string from = ">= " + text(range.first);
  return range.before == 0 ? from : from + ", < " + text(range.before);
}

std::string SmText(const VersionRange& range) {
  if (range.first != 0 && range.first + 1 == range.before) return std::to_string(range.first);
  return RangeText(range, [](size_t sm) { return std::to_string(sm); });
}

std::string DtypesText(const std::vector<DataType>& dtypes) {
  if (dtypes.empty()) return "any";
  std::string text;
  for (DataType type : dtypes) (text += text.empty() ? "" : ", ") += NameOf(type);
  return text;
}

}  // namespace

std::string_view EngineOf(std::string_view plan_name) {
  return plan_name.substr(0, plan_name.find('_'));
}

bool Lists(std::string_view engines, std::string_view engine) {
  while (!engines.empty()) {
    const size_t comma = engines.find(',');
    if (engines.substr(0, comma) == engine) return true;
    engines = comma == std::string_view::npos ? "" : engines.substr(comma + 1);
  }
  return false;
}

const KnownFault* FaultOf(const ConvSpec& spec, const Candidate& candidate, const Target& target,
                          const Demands& demands) {
  for (const KnownFault& row : Table()) {
    if ((!row.op || *row.op == spec.op) &&
        (row.engine.empty() || row.engine == EngineOf(candidate.name)) &&
        HasKnob(candidate.name, row.knob) && (!row.tensor_cores || candidate.tensor_cores) &&
        MayApply(row, target) &&
        (row.dtypes.empty() || std::count(row.dtypes.begin(), row.dtypes.end(), spec.dtype) > 0) &&
        row.condition.holds(spec) && Matters(row.fault, demands)) {
      return &row;
    }
  }
  return nullptr;
}

std::vector<KnownFaultText> KnownFaultsOn(const Target& target) {
  std::vector<KnownFaultText> texts;
  for (const KnownFault& row : Table()) {
    if (MayApply(row, target)) texts.push_back(TextOf(row));
  }
  return texts;
}

KnownFaultText TextOf(const KnownFault& row) {
  std::string engine(row.engine.empty() ? "any engine" : row.engine);
  if (!row.knob.empty()) engine += " with " + std::string(row.knob);
  if (row.tensor_cores) engine += " on tensor cores";
  return {std::string(row.op ? NameOf(*row.op) : "any"),
          std::move(engine),
          SmText(row.sm),
          RangeText(row.cudnn, &VersionText),
          RangeText(row.cublaslt, &VersionText),
          DtypesText(row.dtypes),
          std::string(row.condition.text),
          std::string(NameOf(row.fault)),
          std::string(row.source)};
}

std::string Summary(const KnownFaultText& text) {
  std::string parts = text.engine;
  const auto add = [&parts](const char* what, const std::string& value) {
    if (value != "any") parts += std::string(", ") + what + value;
  };
  add("", text.op);
  add("sm ", text.sm);
  add("cuDNN ", text.cudnn);
  add("cuBLASLt ", text.cublaslt);
  add("", text.dtypes);
  add("", text.condition);
  return parts + ": " + text.fault + " (" + text.source + ")";
}

}  // namespace jaxcudnn
