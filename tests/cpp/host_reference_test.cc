// SPDX-License-Identifier: Apache-2.0
#include "host_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "check.h"

namespace jaxcudnn {
namespace {

using Sizes = std::vector<int64_t>;
using Array = std::vector<double>;

ConvSpec Make(ConvOp op, Sizes x, Sizes w, Sizes y, Sizes stride, Sizes pre, Sizes post,
              Sizes dilation, bool flip, DataType dtype = DataType::kFloat32) {
  return {op, x, w, y, stride, pre, post, dilation, flip, dtype, true};
}

Array Filled(const ConvSpec& spec, Operand operand) {
  int64_t count = 1;
  for (int64_t size : SizesOf(spec, operand)) count *= size;
  const std::vector<int> pattern = Pattern(operand);
  Array array;
  for (int64_t i = 0; i < count; ++i) {
    array.push_back(pattern[static_cast<size_t>(i) % pattern.size()]);
  }
  return array;
}

/// Two spatial dimensions, every product of the form, added to whichever array is the result.
Array ByDefinition(const ConvSpec& s) {
  const Array first = Filled(s, Operand::kFirst), second = Filled(s, Operand::kSecond);
  Array result(Filled(s, Operand::kResult).size(), 0);
  const auto at = [&s](const Sizes& sizes, int64_t n, int64_t c, int64_t h, int64_t w) {
    if (s.channels_first) {
      return static_cast<size_t>(((n * sizes[1] + c) * sizes[2] + h) * sizes[3] + w);
    }
    return static_cast<size_t>(((n * sizes[2] + h) * sizes[3] + w) * sizes[1] + c);
  };
  const int64_t groups = s.x[1] / s.w[1], per_group = s.w[0] / groups;
  for (int64_t n = 0; n < s.x[0]; ++n)
    for (int64_t k = 0; k < s.w[0]; ++k)
      for (int64_t c = 0; c < s.w[1]; ++c)
        for (int64_t oh = 0; oh < s.y[2]; ++oh)
          for (int64_t ow = 0; ow < s.y[3]; ++ow)
            for (int64_t r = 0; r < s.w[2]; ++r)
              for (int64_t q = 0; q < s.w[3]; ++q) {
                const int64_t h = oh * s.stride[0] + r * s.dilation[0] - s.pre_padding[0];
                const int64_t w = ow * s.stride[1] + q * s.dilation[1] - s.pre_padding[1];
                if (h < 0 || h >= s.x[2] || w < 0 || w >= s.x[3]) continue;
                const size_t x = at(s.x, n, k / per_group * s.w[1] + c, h, w);
                const size_t y = at(s.y, n, k, oh, ow);
                const size_t f =
                    at(s.w, k, c, s.flip ? s.w[2] - 1 - r : r, s.flip ? s.w[3] - 1 - q : q);
                if (s.op == ConvOp::kFprop) result[y] += first[x] * second[f];
                if (s.op == ConvOp::kDgrad) result[x] += first[y] * second[f];
                if (s.op == ConvOp::kWgrad) result[f] += first[x] * second[y];
              }
  return result;
}

void SamplesAreTheDefinition(bool channels_first) {
  for (ConvOp op : {ConvOp::kFprop, ConvOp::kDgrad, ConvOp::kWgrad}) {
    for (bool flip : {false, true}) {
      for (ConvSpec spec : {
               Make(op, {3, 4, 7, 9}, {6, 4, 3, 2}, {3, 6, 7, 8}, {1, 1}, {1, 0}, {1, 0}, {1, 1},
                    flip),
               Make(op, {2, 6, 8, 11}, {4, 3, 3, 3}, {2, 4, 4, 4}, {2, 3}, {0, 2}, {2, 1}, {1, 2},
                    flip),
               Make(op, {1, 5, 4, 6}, {5, 1, 2, 3}, {1, 5, 7, 3}, {1, 2}, {2, 1}, {2, 0}, {1, 1},
                    flip),
               // a window that lies in the padding altogether at some positions
               Make(op, {2, 2, 2, 3}, {2, 2, 1, 2}, {2, 2, 8, 10}, {1, 1}, {3, 4}, {3, 4}, {1, 1},
                    flip),
           }) {
        spec.channels_first = channels_first;
        const Array expected = ByDefinition(spec);
        const std::vector<Sample> samples = Samples(spec);
        CHECK(samples.size() == std::min<size_t>(expected.size(), 64));
        CHECK(samples[0].index == 0);
        CHECK(samples[1].index == static_cast<int64_t>(expected.size()) - 1);
        std::set<int64_t> places;
        for (const Sample& sample : samples) {
          CHECK_FOR(sample.exact == expected[static_cast<size_t>(sample.index)],
                    TextOf(spec) + " at " + std::to_string(sample.index));
          places.insert(sample.index);
        }
        CHECK(places.size() > samples.size() / 2);
      }
    }
  }
}

void OtherRanks() {
  // A line of 5 under a window of 1: each output is one product; with 1 tap of 1 channel.
  const ConvSpec line =
      Make(ConvOp::kFprop, {1, 1, 5}, {1, 1, 1}, {1, 1, 5}, {1}, {0}, {0}, {1}, false);
  for (const Sample& sample : Samples(line)) {
    const double product =
        Pattern(Operand::kFirst)[static_cast<size_t>(sample.index)] * Pattern(Operand::kSecond)[0];
    CHECK(sample.exact == product);
  }
  // A cube of 2 x 2 x 2 under a window as large: one sum of eight products, whichever way.
  double sum = 0;
  for (size_t i = 0; i < 8; ++i) sum += Pattern(Operand::kFirst)[i] * Pattern(Operand::kSecond)[i];
  const ConvSpec cube = Make(ConvOp::kFprop, {1, 1, 2, 2, 2}, {1, 1, 2, 2, 2}, {1, 1, 1, 1, 1},
                             {1, 1, 1}, {0, 0, 0}, {0, 0, 0}, {1, 1, 1}, false);
  CHECK(Samples(cube).size() == 1 && Samples(cube)[0].exact == sum);
}

void LongSumsGetFewSamples() {
  const ConvSpec wgrad = Make(ConvOp::kWgrad, {64, 8, 128, 128}, {8, 8, 1, 1}, {64, 8, 128, 128},
                              {1, 1}, {0, 0}, {0, 0}, {1, 1}, false);
  CHECK(Samples(wgrad).size() == 4);
  const ConvSpec longer = Make(ConvOp::kWgrad, {1, 1, 5000, 4000}, {1, 1, 3, 3}, {1, 1, 5000, 4000},
                               {1, 1}, {1, 1}, {1, 1}, {1, 1}, false);
  CHECK(Samples(longer).size() == 1);
}

void NumbersSurviveEncoding() {
  const std::vector<int> values{0, 1, -1, 2, -2, 3, 96, -100};
  for (DataType dtype :
       {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32, DataType::kFloat64}) {
    const auto bytes = Encode(values, dtype);
    const auto size = static_cast<size_t>(RowOf(dtype).bytes);
    CHECK(bytes.size() == values.size() * size);
    for (size_t i = 0; i < values.size(); ++i) CHECK(Decode(&bytes[i * size], dtype) == values[i]);
  }
  const float f = 0.1f, tiny = 1e-40f, inf = -std::numeric_limits<float>::infinity();
  const double d = -1.0 / 3;
  const auto decode = [](const auto& value, DataType dtype) {
    return Decode(reinterpret_cast<const unsigned char*>(&value), dtype);
  };
  CHECK(decode(f, DataType::kFloat32) == static_cast<double>(f));
  CHECK(decode(tiny, DataType::kFloat32) == static_cast<double>(tiny));
  CHECK(decode(inf, DataType::kFloat32) == static_cast<double>(inf));
  CHECK(decode(d, DataType::kFloat64) == d);
  const uint16_t half = 0x3555, nan = 0x7e00, least = 0x0001, bfloat = 0x3f80;
  CHECK(decode(half, DataType::kFloat16) == 0.333251953125);
  CHECK(std::isnan(decode(nan, DataType::kFloat16)));
  CHECK(decode(least, DataType::kFloat16) == std::ldexp(1, -24));
  CHECK(decode(bfloat, DataType::kBFloat16) == 1);
}

void PatternsAreSmallAndDiffer() {
  const auto first = Pattern(Operand::kFirst), second = Pattern(Operand::kSecond);
  std::set<size_t> periods;
  for (Operand operand : kAllOperands) periods.insert(Pattern(operand).size());
  CHECK(periods.size() == kOperands);
  CHECK(std::set<int>(first.begin(), first.end()) == (std::set<int>{-2, -1, 0, 1, 2}));
  CHECK(std::set<int>(second.begin(), second.end()) == (std::set<int>{-2, -1, 0, 1, 2}));
  CHECK(first != second);
}

void AgreementIsOneRounding() {
  CHECK(Agrees(1227, 1227, DataType::kFloat32, Slack::kNone));
  CHECK(!Agrees(1226.9907, 1227, DataType::kFloat32, Slack::kNone));
  CHECK(Agrees(1224, 1227, DataType::kBFloat16, Slack::kNone));   // the two numbers beside 1227
  CHECK(!Agrees(1216, 1227, DataType::kBFloat16, Slack::kNone));  // two steps away
  CHECK(!Agrees(176, 182, DataType::kBFloat16, Slack::kNone));
  CHECK(Agrees(176, 182, DataType::kBFloat16, Slack::kRoundsPartialSums));
  CHECK(!Agrees(-182, 182, DataType::kBFloat16, Slack::kRoundsPartialSums));
  CHECK(!Agrees(std::nan(""), 0, DataType::kFloat16, Slack::kRoundsPartialSums));
  CHECK(!Agrees(std::nan(""), 1e6, DataType::kFloat16, Slack::kNone));
  CHECK(Agrees(std::numeric_limits<double>::infinity(), 1e6, DataType::kFloat16, Slack::kNone));
  CHECK(!Agrees(3, 1e6, DataType::kFloat16, Slack::kNone));
}

void ActivationsAreNearlyExact() {
  CHECK(Agrees(0.7500, 0.7520, DataType::kFloat32, Slack::kActivation));
  CHECK(!Agrees(0.7400, 0.7520, DataType::kFloat32, Slack::kActivation));
  ConvSpec spec = Make(ConvOp::kFprop, {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1}, {0, 0},
                       {0, 0}, {1, 1}, false);
  CHECK(SlackOf(spec, false) == Slack::kNone && SlackOf(spec, true) == Slack::kRoundsPartialSums);
  for (const ActivationRow& row : kActivations) {
    spec.epilogue.activation = row.activation;
    const bool is_exact =
        row.activation == Activation::kNone || row.activation == Activation::kRelu;
    CHECK_FOR((SlackOf(spec, false) == Slack::kNone) == is_exact, std::string(row.name));
  }
}

void EpiloguesFollowTheSum() {
  ConvSpec spec = Make(ConvOp::kFprop, {2, 3, 4, 5}, {7, 3, 1, 1}, {2, 7, 4, 5}, {1, 1}, {0, 0},
                       {0, 0}, {1, 1}, false);
  const std::vector<Sample> bare = Samples(spec);
  const std::vector<int> z = Pattern(Operand::kResidual), b = Pattern(Operand::kBias);
  CHECK(SizesOf(spec, Operand::kResidual).empty() && BytesOf(spec, Operand::kResidual) == 0);
  CHECK(SizesOf(spec, Operand::kBias).empty() && BytesOf(spec, Operand::kBias) == 0);
  for (bool residual : {false, true}) {
    for (bool bias : {false, true}) {
      spec.epilogue = {Activation::kRelu, residual, bias};
      const std::vector<Sample> finished = Samples(spec);
      CHECK(finished.size() == bare.size());
      for (size_t i = 0; i < bare.size(); ++i) {
        const auto place = static_cast<size_t>(bare[i].index);
        const double sum = bare[i].exact + (residual ? z[place] : 0) + (bias ? b[place % 7] : 0);
        CHECK(finished[i].index == bare[i].index && finished[i].exact == std::max(sum, 0.0));
      }
    }
  }
  CHECK(SizesOf(spec, Operand::kResidual) == spec.y && BytesOf(spec, Operand::kResidual) == 1120);
  CHECK(SizesOf(spec, Operand::kBias) == (Sizes{1, 7, 1, 1}));
  CHECK(BytesOf(spec, Operand::kBias) == 28);
  CHECK(BytesOf(spec) ==
        BytesOf(spec, Operand::kFirst) + BytesOf(spec, Operand::kSecond) + 2 * 1120 + 28);
  spec.op = ConvOp::kDgrad;
  CHECK(SizesOf(spec, Operand::kBias) == (Sizes{1, 3, 1, 1}));
}

/// Values at 1 and -1, of which the single sample of a 1 x 1 convolution can be either.
void ActivationsAreTheirFormulas() {
  struct Row {
    Activation activation;
    double at_1, at_minus_1;
  };
  const double e = std::exp(1.0);
  for (const Row& row :
       {Row{Activation::kNone, 1, -1}, Row{Activation::kRelu, 1, 0},
        Row{Activation::kLeakyRelu, 1, -0.01},
        Row{Activation::kGelu, 0.8413447460685429, -0.15865525393145707},
        Row{Activation::kGeluTanh, 0.8411919906082768, -0.15880800939172324},
        Row{Activation::kSilu, e / (e + 1), -1 / (e + 1)}, Row{Activation::kElu, 1, 1 / e - 1},
        Row{Activation::kSoftplus, std::log(1 + e), std::log(1 + 1 / e)},
        Row{Activation::kTanh, std::tanh(1.0), -std::tanh(1.0)},
        Row{Activation::kSigmoid, e / (e + 1), 1 / (e + 1)}}) {
    ConvSpec spec = Make(ConvOp::kFprop, {1, 1, 16, 16}, {1, 1, 1, 1}, {1, 1, 16, 16}, {1, 1},
                         {0, 0}, {0, 0}, {1, 1}, false);
    // The filter's one number may be 0, to which a residual adds every number of its pattern.
    spec.epilogue.residual = true;
    const std::vector<Sample> sums = Samples(spec);
    spec.epilogue.activation = row.activation;
    const std::vector<Sample> activated = Samples(spec);
    int seen = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      const double expected = sums[i].exact == 1 ? row.at_1 : row.at_minus_1;
      if (std::abs(sums[i].exact) != 1) continue;
      seen |= sums[i].exact == 1 ? 1 : 2;
      CHECK_FOR(std::abs(activated[i].exact - expected) < 1e-12,
                std::string(NameOf(row.activation)));
    }
    CHECK(seen == 3);
  }
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  SamplesAreTheDefinition(false);
  SamplesAreTheDefinition(true);
  OtherRanks();
  LongSumsGetFewSamples();
  NumbersSurviveEncoding();
  PatternsAreSmallAndDiffer();
  AgreementIsOneRounding();
  ActivationsAreNearlyExact();
  EpiloguesFollowTheSum();
  ActivationsAreTheirFormulas();
  return testing::failures != 0;
}
