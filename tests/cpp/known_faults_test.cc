// SPDX-License-Identifier: Apache-2.0
#include "known_faults.h"

#include "check.h"

namespace jaxcudnn {
namespace {

ConvSpec Padded(ConvOp op, int64_t low, int64_t high) {
  const int64_t out = 4 + low + high;
  return {op,        {1, 2, 6, 6}, {2, 2, 3, 3}, {1, 2, out, 4},     {1, 1}, {low, 0},
          {high, 0}, {1, 1},       false,        DataType::kFloat32, true};
}

void TheEngineIsTheNamesFirstPart() {
  CHECK(EngineOf("eng20_k2=6_k3=0") == "eng20");
  CHECK(EngineOf("eng1") == "eng1");
}

void OnlyFilterGradientsWithAsymmetricPadding() {
  for (const char* plan : {"eng1", "eng1_k2=6_k3=0", "eng20", "eng20_k2=6_k3=0"}) {
    CHECK(ComputesWrongNumbers(Padded(ConvOp::kWgrad, 1, 0), plan));
    CHECK(ComputesWrongNumbers(Padded(ConvOp::kWgrad, 0, 2), plan));
    CHECK(!ComputesWrongNumbers(Padded(ConvOp::kWgrad, 1, 1), plan));
    CHECK(!ComputesWrongNumbers(Padded(ConvOp::kFprop, 1, 0), plan));
    CHECK(!ComputesWrongNumbers(Padded(ConvOp::kDgrad, 1, 0), plan));
  }
}

void PartialSumsInTheArraysDtype() {
  ConvSpec spec = Padded(ConvOp::kWgrad, 1, 1);
  CHECK(!ComputesWrongNumbers(spec, "eng61_k2=2_k12=264"));
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    spec.dtype = type;
    CHECK(ComputesWrongNumbers(spec, "eng61_k2=2_k12=264"));
    CHECK(!ComputesWrongNumbers(spec, "eng62_k2=4_k17=198"));
    spec.op = ConvOp::kFprop;
    CHECK(!ComputesWrongNumbers(spec, "eng61_k2=2_k12=264"));
    spec.op = ConvOp::kWgrad;
  }
}

void NotOtherEnginesOfLikeName() {
  for (const char* plan : {"eng0", "eng10", "eng12_k2=1", "eng2", "eng200", "eng21"}) {
    CHECK(!ComputesWrongNumbers(Padded(ConvOp::kWgrad, 1, 0), plan));
  }
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  TheEngineIsTheNamesFirstPart();
  OnlyFilterGradientsWithAsymmetricPadding();
  PartialSumsInTheArraysDtype();
  NotOtherEnginesOfLikeName();
  return testing::failures != 0;
}
