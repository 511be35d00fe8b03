// SPDX-License-Identifier: Apache-2.0
#include "conv_spec.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "error.h"

namespace jaxcudnn {
namespace {

struct ConvOpRow {
  ConvOp op;
  std::string_view name;
};
constexpr ConvOpRow kConvOps[] = {
    {ConvOp::kFprop, "fprop"}, {ConvOp::kDgrad, "dgrad"}, {ConvOp::kWgrad, "wgrad"}};

// cuDNN loses the high bits of larger numbers, and ends the process where it divides by the rest.
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
// Bytes of the largest array: more than any memory, and nothing that is computed from it overflows.
constexpr int64_t kLargestArray = int64_t{1} << 50;

void Require(bool condition, const ConvSpec& spec, const std::string& rule) {
  if (!condition) {
    throw Error(ErrorCode::kInvalidArgument,
                "attributes of the custom call: " + rule + ", got " + TextOf(spec));
  }
}

}  // namespace

ConvOp ConvOpFromName(std::string_view name) {
  for (const ConvOpRow& row : kConvOps) {
    if (row.name == name) return row.op;
  }
  throw Error(ErrorCode::kInvalidArgument, "unknown operation '" + std::string(name) + "'");
}

std::string_view NameOf(ConvOp op) {
  for (const ConvOpRow& row : kConvOps) {
    if (row.op == op) return row.name;
  }
  throw Error(ErrorCode::kInternal, "a ConvOp is missing from kConvOps");
}

std::vector<int64_t> Strides(const ConvSpec& spec, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  const auto add = [&](size_t axis) {
    strides[axis] = stride;
    stride *= sizes[axis];
  };
  if (!spec.channels_first) add(1);
  for (size_t axis = sizes.size() - 1; axis >= 2; --axis) add(axis);
  if (spec.channels_first) add(1);
  add(0);
  return strides;
}

double Products(const ConvSpec& spec) {
  const double of_one = std::accumulate(spec.w.begin() + 1, spec.w.end(), 1.0, std::multiplies<>());
  return std::accumulate(spec.y.begin(), spec.y.end(), of_one, std::multiplies<>());
}

bool HasOneChannelAGroup(const ConvSpec& spec) { return spec.w[1] == 1 && spec.x[1] == spec.w[0]; }

bool IsDilated(const ConvSpec& spec) {
  const auto is_spread = [](int64_t dilation) { return dilation > 1; };
  return std::any_of(spec.dilation.begin(), spec.dilation.end(), is_spread);
}

int64_t FewestChannels(const ConvSpec& spec) {
  return std::min(spec.w[1], spec.w[0] / (spec.x[1] / spec.w[1]));
}

void Validate(const ConvSpec& spec) {
  const size_t spatial = spec.spatial_rank();
  Require(spatial == 2 || spatial == 3, spec, "there must be two or three spatial dimensions");
  for (const auto* sizes : {&spec.x, &spec.w, &spec.y}) {
    Require(sizes->size() == spatial + 2, spec,
            "x, w and y must have two more dimensions than stride");
    for (int64_t size : *sizes) Require(size > 0, spec, "sizes must be positive");
  }
  for (const auto* list : {&spec.pre_padding, &spec.post_padding, &spec.dilation}) {
    Require(list->size() == spatial, spec, "padding and dilation must be as long as stride");
  }
  for (const auto* list : {&spec.x, &spec.w, &spec.y, &spec.stride, &spec.pre_padding,
                           &spec.post_padding, &spec.dilation}) {
    for (int64_t number : *list) Require(number <= kLargest, spec, "no number may exceed 2^31 - 1");
  }
  for (const auto* sizes : {&spec.x, &spec.w, &spec.y}) {
    int64_t bytes = RowOf(spec.dtype).bytes;
    for (int64_t size : *sizes) {
      Require(size <= kLargestArray / bytes, spec, "no array may exceed 2^50 bytes");
      bytes *= size;
    }
  }
  for (size_t i = 0; i < spatial; ++i) {
    Require(spec.stride[i] > 0 && spec.dilation[i] > 0, spec,
            "stride and dilation must be positive");
    Require(spec.pre_padding[i] >= 0 && spec.post_padding[i] >= 0, spec,
            "padding must not be negative");
    const int64_t padded = spec.x[i + 2] + spec.pre_padding[i] + spec.post_padding[i];
    Require(padded <= kLargest, spec, "x with its padding must not exceed 2^31 - 1");
    const int64_t steps = spec.w[i + 2] - 1;  // between the taps of a window
    const bool fits = steps <= (padded - 1) / spec.dilation[i];
    Require(fits && spec.y[i + 2] == (padded - 1 - steps * spec.dilation[i]) / spec.stride[i] + 1,
            spec, "y must have the size that x, w, stride, padding and dilation give");
  }
  Require(spec.op != ConvOp::kWgrad || spec.epilogue.is_empty(), spec,
          "a filter gradient must have neither activation nor residual nor bias");
  Require(spec.x[0] == spec.y[0] && spec.w[0] == spec.y[1] && spec.x[1] % spec.w[1] == 0 &&
              spec.w[0] % (spec.x[1] / spec.w[1]) == 0,
          spec, "batch, channels and groups must agree");
}

}  // namespace jaxcudnn
