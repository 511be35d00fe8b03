// SPDX-License-Identifier: Apache-2.0
#include "conv_spec.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "dtypes.h"
#include "error.h"
#include "fields.h"
#include "plan_request.h"

namespace jaxcudnn {
namespace {

using testing::Throws;

template <typename T>
constexpr size_t kFieldCount = std::tuple_size_v<decltype(std::declval<const T&>().fields())>;

// Everything distinct, so that no two lists can be exchanged unnoticed.
ConvSpec Base() {
  return {ConvOp::kFprop,
          {8, 12, 20, 31},
          {6, 4, 3, 5},
          {8, 6, 11, 9},
          {2, 3},
          {1, 0},
          {2, 4},
          {1, 2},
          /*flip=*/false,
          DataType::kBFloat16,
          /*allow_tf32=*/true};
}

PlanOptions BaseOptions() {
  return {"measure",
          /*deterministic=*/false,
          /*allow_reduced_precision_reduction=*/false,
          /*allow_runtime_compilation=*/true,
          /*exclude_engines=*/"eng5",
          /*verify=*/false,
          64,
          5000,
          150000};
}

Problem BaseProblem() { return {Base(), BaseOptions(), 1 << 20, 16}; }
PlanRequest BaseRequest() { return {BaseProblem(), 0}; }

template <typename T>
struct Change {
  const char* field;
  std::function<void(T&)> apply;
};

const std::vector<Change<ConvSpec>>& SpecChanges() {
  static const auto* changes = new std::vector<Change<ConvSpec>>{
      {"op", [](ConvSpec& s) { s.op = ConvOp::kDgrad; }},
      {"x", [](ConvSpec& s) { ++s.x[3]; }},
      {"w", [](ConvSpec& s) { ++s.w[0]; }},
      {"y", [](ConvSpec& s) { ++s.y[2]; }},
      {"stride", [](ConvSpec& s) { ++s.stride[1]; }},
      {"pre_padding", [](ConvSpec& s) { ++s.pre_padding[0]; }},
      {"post_padding", [](ConvSpec& s) { ++s.post_padding[0]; }},
      {"dilation", [](ConvSpec& s) { ++s.dilation[1]; }},
      {"flip", [](ConvSpec& s) { s.flip = true; }},
      {"dtype", [](ConvSpec& s) { s.dtype = DataType::kFloat16; }},
      {"allow_tf32", [](ConvSpec& s) { s.allow_tf32 = false; }},
      {"channels_first", [](ConvSpec& s) { s.channels_first = true; }},
      {"epilogue", [](ConvSpec& s) { s.epilogue.activation = Activation::kRelu; }},
      {"epilogue", [](ConvSpec& s) { s.epilogue.residual = true; }},
      {"epilogue", [](ConvSpec& s) { s.epilogue.bias = true; }},
  };
  return *changes;
}

template <typename T>
void CheckDiffer(const T& a, const T& b, const std::string& what) {
  CHECK_FOR(!(a == b), what);
  CHECK_FOR(HashOf(a) != HashOf(b), what);
  CHECK_FOR(TextOf(a) != TextOf(b), what);
}

// The bindings stop compiling when a member is added, which is the reminder to list it everywhere.
void FieldsListEveryMember() {
  const ConvSpec spec = Base();
  const auto& [op, x, w, y, stride, pre, post, dilation, flip, dtype, allow_tf32, first, epilogue] =
      spec;
  (void)std::tie(op, x, w, y, stride, pre, post, dilation, flip, dtype, allow_tf32, first,
                 epilogue);
  const auto& [activation, residual, bias] = epilogue;
  (void)std::tie(activation, residual, bias);
  static_assert(kFieldCount<Epilogue> == 3);
  static_assert(kFieldCount<ConvSpec> == 13);
  const PlanOptions options = BaseOptions();
  const auto& [algorithm, deterministic, reduced, compiled, excluded, verify, candidates,
               candidate_us, us] = options;
  (void)std::tie(algorithm, deterministic, reduced, compiled, excluded, verify, candidates,
                 candidate_us, us);
  static_assert(kFieldCount<PlanOptions> == 9);
  const Problem problem = BaseProblem();
  const auto& [inner, choice, workspace_limit, alignment] = problem;
  (void)std::tie(inner, choice, workspace_limit, alignment);
  static_assert(kFieldCount<Problem> == 4);
  const PlanRequest request = BaseRequest();
  const auto& [asked, device] = request;
  (void)std::tie(asked, device);
  static_assert(kFieldCount<PlanRequest> == 2);
}

const std::vector<Change<PlanOptions>>& OptionsChanges() {
  static const auto* changes = new std::vector<Change<PlanOptions>>{
      {"algorithm", [](PlanOptions& o) { o.algorithm = "eng5_k2=0"; }},
      {"deterministic", [](PlanOptions& o) { o.deterministic = true; }},
      {"allow_reduced_precision_reduction",
       [](PlanOptions& o) { o.allow_reduced_precision_reduction = true; }},
      {"allow_runtime_compilation", [](PlanOptions& o) { o.allow_runtime_compilation = false; }},
      {"exclude_engines", [](PlanOptions& o) { o.exclude_engines = "eng6"; }},
      {"verify", [](PlanOptions& o) { o.verify = true; }},
      {"tuning_candidates", [](PlanOptions& o) { ++o.tuning_candidates; }},
      {"tuning_candidate_us", [](PlanOptions& o) { ++o.tuning_candidate_us; }},
      {"tuning_us", [](PlanOptions& o) { ++o.tuning_us; }},
  };
  return *changes;
}

void AlgorithmsAreToldApart() {
  const auto with = [](const char* algorithm) {
    PlanOptions options = BaseOptions();
    options.algorithm = algorithm;
    return options;
  };
  CHECK(with("measure").is_measured() && with("exhaustive").is_measured());
  CHECK(!with("heuristic").is_measured() && !with("eng5").is_measured());
  CHECK(with("exhaustive").is_exhaustive() && !with("measure").is_exhaustive());
  CHECK(with("eng5").is_named() && !with("heuristic").is_named() && !with("measure").is_named());
}

void EqualValuesHaveEqualKeys() {
  CHECK(BaseRequest() == BaseRequest());
  CHECK(HashOf(BaseRequest()) == HashOf(BaseRequest()));
  CHECK(FieldsHash{}(BaseRequest()) == HashOf(BaseRequest()));
  CHECK(TextOf(BaseRequest()) == TextOf(BaseRequest()));
}

void EveryFieldIsInTheKey() {
  CHECK(SpecChanges().size() == kFieldCount<ConvSpec> + kFieldCount<Epilogue> - 1);
  for (const auto& change : SpecChanges()) {
    PlanRequest request = BaseRequest();
    change.apply(request.problem.spec);
    CheckDiffer(Base(), request.problem.spec, change.field);
    CheckDiffer(BaseRequest(), request, change.field);
    CHECK_FOR(
        TextOf(request.problem.spec).find(std::string(change.field) + "=") != std::string::npos,
        change.field);
  }
  CHECK(OptionsChanges().size() == kFieldCount<PlanOptions>);
  for (const auto& change : OptionsChanges()) {
    PlanRequest request = BaseRequest();
    change.apply(request.problem.options);
    CheckDiffer(BaseOptions(), request.problem.options, change.field);
    CheckDiffer(BaseRequest(), request, change.field);
  }
  const std::vector<Change<PlanRequest>> changes{
      {"workspace_limit", [](PlanRequest& r) { ++r.problem.workspace_limit; }},
      {"alignment", [](PlanRequest& r) { r.problem.alignment = 2; }},
      {"device", [](PlanRequest& r) { r.device = 1; }},
  };
  for (const auto& change : changes) {
    PlanRequest request = BaseRequest();
    change.apply(request);
    CheckDiffer(BaseRequest(), request, change.field);
  }
}

void EveryPositionIsInTheKey() {
  for (auto list : {&ConvSpec::x, &ConvSpec::w, &ConvSpec::y, &ConvSpec::stride,
                    &ConvSpec::pre_padding, &ConvSpec::post_padding, &ConvSpec::dilation}) {
    for (size_t i = 0; i < (Base().*list).size(); ++i) {
      ConvSpec spec = Base();
      ++(spec.*list)[i];
      CheckDiffer(Base(), spec, "position " + std::to_string(i));
    }
    ConvSpec longer = Base();
    (longer.*list).push_back(0);
    CheckDiffer(Base(), longer, "a longer list");
    ConvSpec exchanged = Base();
    std::swap((exchanged.*list)[0], (exchanged.*list)[1]);
    CheckDiffer(Base(), exchanged, "two positions exchanged");
  }
  ConvSpec exchanged = Base();
  std::swap(exchanged.pre_padding, exchanged.post_padding);
  CheckDiffer(Base(), exchanged, "two lists exchanged");
}

void NamesAreReadAsTheyAreWritten() {
  for (ConvOp op : {ConvOp::kFprop, ConvOp::kDgrad, ConvOp::kWgrad}) {
    CHECK(ConvOpFromName(NameOf(op)) == op);
  }
  for (const DataTypeRow& row : kDataTypes) {
    CHECK(DataTypeFromName(NameOf(row.type)) == row.type);
  }
  CHECK(RowOf(DataType::kFloat16).bytes == 2 && RowOf(DataType::kBFloat16).bytes == 2);
  CHECK(RowOf(DataType::kFloat32).bytes == 4);
  CHECK(Throws(ErrorCode::kInvalidArgument, "'conv'", [] { (void)ConvOpFromName("conv"); }));
  CHECK(Throws(ErrorCode::kInvalidArgument, "'int8'", [] { (void)DataTypeFromName("int8"); }));
  CHECK(TextOf(Base()) ==
        "op=fprop x=(8,12,20,31) w=(6,4,3,5) y=(8,6,11,9) stride=(2,3) pre_padding=(1,0) "
        "post_padding=(2,4) dilation=(1,2) flip=false dtype=bfloat16 allow_tf32=true "
        "channels_first=false epilogue=activation= residual=false bias=false");
  for (const ActivationRow& row : kActivations) {
    CHECK(ActivationFromName(NameOf(row.activation)) == row.activation);
  }
  CHECK(Throws(ErrorCode::kInvalidArgument, "'relu6'", [] { (void)ActivationFromName("relu6"); }));
  CHECK(Epilogue{}.is_empty() && !Epilogue{Activation::kRelu}.is_empty());
  CHECK(!(Epilogue{Activation::kNone, true}.is_empty()));
  CHECK(!(Epilogue{Activation::kNone, false, true}.is_empty()));
}

void StridesArePacked() {
  ConvSpec spec = Base();
  using Sizes = std::vector<int64_t>;
  CHECK(Strides(spec, {8, 12, 20, 31}) == (Sizes{7440, 1, 372, 12}));
  CHECK(Strides(spec, {6, 4, 3, 5, 2}) == (Sizes{120, 1, 40, 8, 4}));
  spec.channels_first = true;
  CHECK(Strides(spec, {8, 12, 20, 31}) == (Sizes{7440, 620, 31, 1}));
  CHECK(Strides(spec, {6, 4, 3, 5, 2}) == (Sizes{120, 30, 10, 2, 1}));
}

void WhatAConvolutionIsLike() {
  ConvSpec spec = Base();  // 8 images of 11 x 9, 6 channels, each of 4 x 3 x 5 products
  CHECK(Products(spec) == 8.0 * 6 * 11 * 9 * 60);
  CHECK(FewestChannels(spec) == 2 && !HasOneChannelAGroup(spec));
  CHECK(IsDilated(spec));
  spec.dilation = {1, 1};
  CHECK(!IsDilated(spec));
  spec.w = {36, 12, 3, 5};
  CHECK(FewestChannels(spec) == 12);
  spec.w = {24, 1, 3, 5};  // two outputs for each input
  CHECK(FewestChannels(spec) == 1 && !HasOneChannelAGroup(spec));
  spec.w = {12, 1, 3, 5};
  CHECK(FewestChannels(spec) == 1 && HasOneChannelAGroup(spec));
}

void ValidateAcceptsWhatCuDnnCanBeAsked() {
  Validate(Base());
  ConvSpec fused = Base();
  fused.epilogue = {Activation::kGelu, true, true};
  for (ConvOp op : {ConvOp::kFprop, ConvOp::kDgrad}) {
    fused.op = op;
    Validate(fused);
  }
  fused.op = ConvOp::kWgrad;
  CHECK(Throws(ErrorCode::kInvalidArgument, "neither activation nor", [&] { Validate(fused); }));
  ConvSpec volume{ConvOp::kWgrad,
                  {1, 1, 4, 5, 6},
                  {1, 1, 4, 5, 6},
                  {1, 1, 1, 1, 1},
                  {1, 1, 1},
                  {0, 0, 0},
                  {0, 0, 0},
                  {1, 1, 1},
                  true,
                  DataType::kFloat32,
                  false};
  Validate(volume);  // a window as large as the image
  ConvSpec far = Base();
  far.w[2] = 1;
  far.y[2] = 12;
  far.dilation[0] = std::numeric_limits<int32_t>::max();  // of one tap: it spans one position
  Validate(far);
}

void ValidateRefuses(const std::string& rule, const std::function<void(ConvSpec&)>& change) {
  ConvSpec spec = Base();
  change(spec);
  const auto validate = [&] { Validate(spec); };
  const std::string text = testing::ErrorOf(validate);
  CHECK_FOR(Throws(ErrorCode::kInvalidArgument, rule, validate), rule + ", but: " + text);
  CHECK_FOR(text.find(TextOf(spec)) != std::string::npos, text);  // the values are named
}

void ValidateRefusesEachBrokenRule() {
  const int64_t largest = std::numeric_limits<int64_t>::max();
  const std::string rank = "two or three spatial dimensions";
  ValidateRefuses(rank, [](ConvSpec& s) { s.stride = {1}; });
  ValidateRefuses(rank, [](ConvSpec& s) { s.stride = {}; });
  ValidateRefuses(rank, [](ConvSpec& s) { s.stride = {1, 1, 1, 1}; });
  for (auto sizes : {&ConvSpec::x, &ConvSpec::w, &ConvSpec::y}) {
    ValidateRefuses("two more dimensions", [&](ConvSpec& s) { (s.*sizes).push_back(1); });
    ValidateRefuses("two more dimensions", [&](ConvSpec& s) { (s.*sizes).clear(); });
    for (size_t i = 0; i < 4; ++i) {
      ValidateRefuses("sizes must be positive", [&](ConvSpec& s) { (s.*sizes)[i] = 0; });
      ValidateRefuses("sizes must be positive", [&](ConvSpec& s) { (s.*sizes)[i] = -1; });
    }
  }
  for (auto list : {&ConvSpec::pre_padding, &ConvSpec::post_padding, &ConvSpec::dilation}) {
    ValidateRefuses("as long as stride", [&](ConvSpec& s) { (s.*list).pop_back(); });
    ValidateRefuses("as long as stride", [&](ConvSpec& s) { (s.*list).push_back(1); });
  }
  for (auto list : {&ConvSpec::stride, &ConvSpec::dilation}) {
    ValidateRefuses("must be positive", [&](ConvSpec& s) { (s.*list)[1] = 0; });
    ValidateRefuses("must be positive", [&](ConvSpec& s) { (s.*list)[0] = -2; });
  }
  for (auto list : {&ConvSpec::pre_padding, &ConvSpec::post_padding}) {
    ValidateRefuses("must not be negative", [&](ConvSpec& s) { (s.*list)[1] = -1; });
    ValidateRefuses("exceed 2^31 - 1", [&](ConvSpec& s) { (s.*list)[0] = largest; });
  }
  const int64_t beyond = int64_t{1} << 31;  // cuDNN would see 0
  for (auto list : {&ConvSpec::x, &ConvSpec::w, &ConvSpec::y, &ConvSpec::stride,
                    &ConvSpec::pre_padding, &ConvSpec::post_padding, &ConvSpec::dilation}) {
    ValidateRefuses("exceed 2^31 - 1", [&](ConvSpec& s) { (s.*list)[0] = beyond; });
  }
  ValidateRefuses("x with its padding must not exceed 2^31 - 1",
                  [&](ConvSpec& s) { s.pre_padding[0] = s.post_padding[0] = beyond - 1; });
  ValidateRefuses("no array may exceed 2^50 bytes",
                  [&](ConvSpec& s) { s.x[0] = s.x[2] = beyond - 1; });
  for (size_t i : {2, 3}) {
    ValidateRefuses("y must have the size", [&](ConvSpec& s) { ++s.y[i]; });
    ValidateRefuses("y must have the size", [&](ConvSpec& s) { --s.y[i]; });
    ValidateRefuses("y must have the size", [&](ConvSpec& s) { s.w[i] = 100; });
    ValidateRefuses("y must have the size", [&](ConvSpec& s) { s.dilation[i - 2] = beyond - 1; });
  }
  const std::string agree = "batch, channels and groups must agree";
  ValidateRefuses(agree, [](ConvSpec& s) { s.y[0] = 7; });
  ValidateRefuses(agree, [](ConvSpec& s) { s.y[1] = 5; });
  ValidateRefuses(agree, [](ConvSpec& s) { s.w[1] = 5; });  // 12 channels
  ValidateRefuses(agree, [](ConvSpec& s) { s.w[1] = 24; });
  ValidateRefuses(agree, [](ConvSpec& s) { s.w[0] = s.y[1] = 7; });  // in 3 groups
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  FieldsListEveryMember();
  AlgorithmsAreToldApart();
  EqualValuesHaveEqualKeys();
  EveryFieldIsInTheKey();
  EveryPositionIsInTheKey();
  NamesAreReadAsTheyAreWritten();
  StridesArePacked();
  WhatAConvolutionIsLike();
  ValidateAcceptsWhatCuDnnCanBeAsked();
  ValidateRefusesEachBrokenRule();
  return testing::failures != 0;
}
