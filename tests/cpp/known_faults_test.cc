// SPDX-License-Identifier: Apache-2.0
#include "known_faults.h"

#include "check.h"

namespace jaxcudnn {
namespace {

constexpr Target kH200 = {90, 91900, 130100};
constexpr ConvOp kOps[] = {ConvOp::kFprop, ConvOp::kDgrad, ConvOp::kWgrad};
constexpr DataType kTypes[] = {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32,
                               DataType::kFloat64};

ConvSpec Padded(ConvOp op, int64_t low, int64_t high) {
  const int64_t out = 4 + low + high;
  return {op,        {1, 2, 6, 6}, {2, 2, 3, 3}, {1, 2, out, 4},     {1, 1}, {low, 0},
          {high, 0}, {1, 1},       false,        DataType::kFloat32, true};
}

ConvSpec Ordinary(ConvOp op, DataType type = DataType::kFloat32) {
  ConvSpec spec = Padded(op, 1, 1);
  spec.dtype = type;
  return spec;
}

bool Barred(const ConvSpec& spec, const char* plan, const Target& target = kH200,
            const Demands& demands = {}) {
  return FaultOf(spec, {plan}, target, demands) != nullptr;
}

void TheEngineIsTheNamesFirstPart() {
  CHECK(EngineOf("eng20_k2=6_k3=0") == "eng20");
  CHECK(EngineOf("eng1") == "eng1");
}

void OnlyFilterGradientsWithAsymmetricPadding() {
  for (const char* plan : {"eng1", "eng1_k2=6_k3=0", "eng20", "eng20_k2=6_k3=0"}) {
    CHECK(Barred(Padded(ConvOp::kWgrad, 1, 0), plan));
    CHECK(Barred(Padded(ConvOp::kWgrad, 0, 2), plan));
    CHECK(!Barred(Padded(ConvOp::kWgrad, 1, 1), plan));
    CHECK(!Barred(Padded(ConvOp::kFprop, 1, 0), plan));
    CHECK(!Barred(Padded(ConvOp::kDgrad, 1, 0), plan));
  }
}

void PartialSumsInTheArraysDtype() {
  constexpr const char* kPlan = "eng61_k2=2_k12=264";
  for (ConvOp op : kOps) {
    for (DataType type : kTypes) {
      const bool rounds = op == ConvOp::kWgrad && RowOf(type).bytes == 2;
      CHECK_FOR(Barred(Ordinary(op, type), kPlan) == rounds, NameOf(type));
      CHECK(!Barred(Ordinary(op, type), "eng62_k2=4_k17=198"));
    }
  }
}

void PlansWithKnobs() {
  const auto wgrad = [](DataType type) { return Ordinary(ConvOp::kWgrad, type); };
  for (DataType type : kTypes) {
    const bool rounds = RowOf(type).bytes == 2;
    CHECK(Barred(wgrad(type), "eng47_k0=14_k2=5_k5=3") == rounds);
    CHECK(Barred(wgrad(type), "eng62_k25=1") == rounds);
    CHECK(Barred(wgrad(type), "eng62_k2=0_k25=1_k27=8") == rounds);
    for (const char* right : {"eng47", "eng47_k2=7_k5=4", "eng47_k10=4", "eng62", "eng62_k25=0",
                              "eng62_k25=12", "eng62_k125=1"}) {
      CHECK_FOR(!Barred(wgrad(type), right), right);
    }
  }
  CHECK(!Barred(Ordinary(ConvOp::kFprop, DataType::kBFloat16), "eng62_k25=1"));
  CHECK(!Barred(wgrad(DataType::kBFloat16), "eng62_k25=1", kH200, {false, true}));
}

void TransformsThatDoNotSayThatTheyAre() {
  const char* const engines[] = {"eng4", "eng5", "eng17"};
  for (size_t op = 0; op < 3; ++op) {
    for (size_t engine = 0; engine < 3; ++engine) {
      const std::string plan = std::string(engines[engine]) + "_k25=0";
      CHECK_FOR(Barred(Ordinary(kOps[op]), plan.c_str(), kH200, {false, true}) == (op == engine),
                plan);
    }
  }
}

void ListsAreReadByName() {
  CHECK(Lists("eng5,eng57", "eng5") && Lists("eng5,eng57", "eng57") && Lists("eng5", "eng5"));
  CHECK(!Lists("eng57", "eng5") && !Lists("", "eng5") && !Lists("eng15", "eng5"));
}

void PartialSumsMayBeAllowed() {
  const ConvSpec spec = Ordinary(ConvOp::kWgrad, DataType::kFloat16);
  CHECK(Barred(spec, "eng61", kH200, {true, false}));
  CHECK(!Barred(spec, "eng61", kH200, {false, true}));
}

void WrongNumbersMayNot() {
  CHECK(Barred(Padded(ConvOp::kWgrad, 1, 0), "eng1", kH200, {false, true}));
}

void NotOtherEnginesOfLikeName() {
  for (const char* plan : {"eng0", "eng10", "eng12_k2=1", "eng2", "eng200", "eng21", "eng5"}) {
    CHECK(!Barred(Padded(ConvOp::kWgrad, 1, 0), plan));
  }
}

void OnlyWhereDeterminismIsAskedFor() {
  const Target target = {86, 92301, 130100};
  const ConvSpec fprop = Ordinary(ConvOp::kFprop);
  const Demands deterministic = {true, false};
  CHECK(Barred(fprop, "eng5_k2=1", target, deterministic));
  CHECK(!Barred(fprop, "eng5_k2=1", target));
  CHECK(!Barred(fprop, "eng57_k2=1", target, deterministic));
  CHECK(!Barred(Ordinary(ConvOp::kWgrad), "eng5", target, deterministic));
}

void FromOneVersionUpToAnother() {
  const Demands deterministic = {true, false};
  const auto barred = [&](size_t sm, size_t cudnn) {
    return Barred(Ordinary(ConvOp::kFprop), "eng5", {sm, cudnn, 130100}, deterministic);
  };
  CHECK(barred(86, 92301));
  CHECK(barred(86, 92399));
  CHECK(!barred(86, 92300));
  CHECK(!barred(86, 92400));
  CHECK(!barred(80, 92301));
  CHECK(!barred(87, 92301));
}

void WhatIsNotKnownMayBeAffected() {
  const Demands deterministic = {true, false};
  for (const Target& target : {Target{0, 92301, 0}, Target{86, 0, 0}, Target{}}) {
    CHECK(Barred(Ordinary(ConvOp::kFprop), "eng5", target, deterministic));
  }
  CHECK(!Barred(Ordinary(ConvOp::kFprop), "eng5", {0, 92400, 0}, deterministic));
}

void EnginesOfAnOldCublasLt() {
  for (ConvOp op : kOps) {
    for (const char* plan : {"eng58_k24=1", "eng63"}) {
      CHECK(Barred(Ordinary(op), plan, {120, 92400, 130600}));
      CHECK(!Barred(Ordinary(op), plan, {120, 92400, 130601}));
      CHECK(!Barred(Ordinary(op), plan, {100, 92400, 130600}));
      CHECK(!Barred(Ordinary(op), plan, {121, 92400, 130600}));
    }
  }
}

void Tf32InThreeDimensions() {
  const auto barred = [](const ConvSpec& spec, bool tensor_cores, size_t cudnn) {
    return FaultOf(spec, {"eng33", tensor_cores}, {90, cudnn, 130100}, {}) != nullptr;
  };
  for (ConvOp op : kOps) {
    ConvSpec spec = {
        op,        {1, 2, 6, 6, 6}, {2, 2, 3, 3, 3}, {1, 2, 4, 4, 4},    {1, 1, 1}, {0, 0, 0},
        {0, 0, 0}, {1, 1, 1},       false,           DataType::kFloat32, true};
    CHECK(barred(spec, true, 91002));
    CHECK(barred(spec, true, 91501));
    CHECK(!barred(spec, true, 91001));
    CHECK(!barred(spec, true, 91600));
    CHECK(!barred(spec, false, 91002));
    CHECK(!barred(Ordinary(op), true, 91002));
    spec.dtype = DataType::kFloat16;
    CHECK(!barred(spec, true, 91002));
  }
}

void LargeDepthwiseOnes() {
  const auto barred = [](int64_t channels, int64_t per_group, int64_t width, size_t cudnn) {
    ConvSpec spec = Ordinary(ConvOp::kFprop);
    spec.x = {1, channels, 1 << 15, width};
    spec.y = {1, channels, 1, 1};
    spec.w = {channels, per_group, 3, 3};
    const bool x_is_large = Barred(spec, "eng0", {90, cudnn, 130100});
    std::swap(spec.x, spec.y);
    CHECK(Barred(spec, "eng0", {90, cudnn, 130100}) == x_is_large);
    return x_is_large;
  };
  CHECK(barred(2, 1, 1 << 15, 91001));
  CHECK(barred(2, 1, 1 << 15, 91499));
  CHECK(!barred(2, 1, 1 << 15, 91000));
  CHECK(!barred(2, 1, 1 << 15, 91500));
  CHECK(!barred(2, 1, (1 << 15) - 1, 91001));  // elements: 2^31 less 2^16
  CHECK(!barred(2, 2, 1 << 15, 91001));
  CHECK(!barred(1, 1, 1 << 16, 91001));  // one channel is no depthwise convolution
}

void WhatIsShown() {
  const auto shown = [](const Target& target) {
    std::string lines;
    for (const KnownFaultText& row : KnownFaultsOn(target)) lines += Summary(row) + "\n";
    return lines;
  };
  const std::string everywhere =
      "eng1, wgrad, low and high padding differ: wrong numbers (docs/decisions.md)\n"
      "eng20, wgrad, low and high padding differ: wrong numbers (docs/decisions.md)\n"
      "eng61, wgrad, float16, bfloat16: rounds partial sums (docs/decisions.md)\n"
      "eng47 with k0, wgrad, float16, bfloat16: rounds partial sums (docs/decisions.md)\n"
      "eng62 with k25=1, wgrad, float16, bfloat16: rounds partial sums (docs/decisions.md)\n"
      "eng4, fprop: transforms by FFT, which is not exact (docs/decisions.md)\n"
      "eng5, dgrad: transforms by FFT, which is not exact (docs/decisions.md)\n"
      "eng17, wgrad: transforms by FFT, which is not exact (docs/decisions.md)\n";
  CHECK(shown(kH200) == everywhere);
  CHECK(shown({86, 92301, 130601}) ==
        everywhere +
            "eng5, fprop, sm 86, cuDNN >= 9.23.1, < 9.24.0: not deterministic "
            "(https://github.com/pytorch/pytorch/pull/189207)\n");
  CHECK(shown({120, 92400, 130600}) ==
        everywhere +
            "eng58, sm 120, cuBLASLt < 13.6.1: illegal memory access "
            "(https://github.com/pytorch/pytorch/pull/191701)\n"
            "eng63, sm 120, cuBLASLt < 13.6.1: illegal memory access "
            "(https://github.com/pytorch/pytorch/pull/191701)\n");
  CHECK(shown({90, 91200, 130601}) ==
        everywhere +
            "any engine on tensor cores, cuDNN >= 9.10.2, < 9.16.0, float32, three "
            "spatial dimensions: wrong numbers "
            "(https://github.com/pytorch/pytorch/pull/167024)\n"
            "any engine, cuDNN >= 9.10.1, < 9.15.0, depthwise, x or y of more than "
            "2^31 - 1 elements: wrong numbers "
            "(https://github.com/pytorch/pytorch/pull/168364)\n");
  CHECK(KnownFaultsOn({}).size() == 13);
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  TheEngineIsTheNamesFirstPart();
  OnlyFilterGradientsWithAsymmetricPadding();
  PartialSumsInTheArraysDtype();
  PlansWithKnobs();
  TransformsThatDoNotSayThatTheyAre();
  ListsAreReadByName();
  PartialSumsMayBeAllowed();
  WrongNumbersMayNot();
  NotOtherEnginesOfLikeName();
  OnlyWhereDeterminismIsAskedFor();
  FromOneVersionUpToAnother();
  WhatIsNotKnownMayBeAffected();
  EnginesOfAnOldCublasLt();
  Tf32InThreeDimensions();
  LargeDepthwiseOnes();
  WhatIsShown();
  return testing::failures != 0;
}
