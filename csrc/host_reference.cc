// SPDX-License-Identifier: Apache-2.0
#include "host_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "error.h"

namespace jaxcudnn {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t kMostProducts = int64_t{1} << 22;  // of all samples: some milliseconds
constexpr int64_t kMostSamples = 64, kFewestSamples = 4;
constexpr int64_t kVeryLong = int64_t{1} << 24;  // a sum that alone takes a tenth of a second

struct Format {
  int exponent_bits, fraction_bits;
};

Format FormatOf(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return {5, 10};
    case DataType::kBFloat16:
      return {8, 7};
    case DataType::kFloat32:
      return {8, 23};
    case DataType::kFloat64:
      return {11, 52};
  }
  throw Error(ErrorCode::kInternal, "a DataType is missing from FormatOf");
}

int64_t Count(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// The place in memory of an element at logical indices N C spatial... .
int64_t Place(const Sizes& strides, const Sizes& at) {
  return std::inner_product(at.begin(), at.end(), strides.begin(), int64_t{0});
}

/// The logical indices of an element at a place in memory.
Sizes IndicesOf(const Sizes& sizes, const Sizes& strides, int64_t place) {
  Sizes at(sizes.size());
  for (size_t axis = 0; axis < sizes.size(); ++axis) at[axis] = place / strides[axis] % sizes[axis];
  return at;
}

/// Calls `visit` with every index below `sizes`.
template <typename Visit>
void ForEach(const Sizes& sizes, const Visit& visit) {
  Sizes at(sizes.size(), 0);
  for (int64_t left = Count(sizes); left > 0; --left) {
    visit(at);
    for (size_t axis = sizes.size(); axis-- > 0;) {
      if (++at[axis] < sizes[axis]) break;
      at[axis] = 0;
    }
  }
}

/// The form <dy, conv(x, w)> as the list of its products: for images n, output channels k, input
/// channels c of k's group, output positions and taps, x[n, c, o * stride + r * dilation - pad]
/// w[k, c, r] dy[n, k, o], where the tap r of a reversed window is the one from its other end.
class Definition {
 public:
  explicit Definition(const ConvSpec& spec)
      : spec_(spec),
        groups_(spec.x[1] / spec.w[1]),
        x_(Strides(spec, spec.x)),
        w_(Strides(spec, spec.w)),
        y_(Strides(spec, spec.y)),
        first_(Pattern(Operand::kFirst)),
        second_(Pattern(Operand::kSecond)) {}

  [[nodiscard]] int64_t At(const Sizes& result) const {
    switch (spec_.op) {
      case ConvOp::kFprop:
        return Fprop(result);
      case ConvOp::kDgrad:
        return Dgrad(result);
      case ConvOp::kWgrad:
        return Wgrad(result);
    }
    throw Error(ErrorCode::kInternal, "a ConvOp is missing from Definition");
  }

  /// How many products a sum has, or would have without padding.
  [[nodiscard]] int64_t Products() const {
    const int64_t window = Count(Spatial(spec_.w));
    switch (spec_.op) {
      case ConvOp::kFprop:
        return window * spec_.w[1];
      case ConvOp::kDgrad:
        return window * spec_.w[0] / groups_;
      case ConvOp::kWgrad:
        return spec_.y[0] * Count(Spatial(spec_.y));
    }
    throw Error(ErrorCode::kInternal, "a ConvOp is missing from Definition");
  }

 private:
  static Sizes Spatial(const Sizes& sizes) { return {sizes.begin() + 2, sizes.end()}; }

  /// The sum of `count` products, whose factors lie in equal steps in the operands' memory.
  [[nodiscard]] int64_t Dot(int64_t count, int64_t first, int64_t first_step, int64_t second,
                            int64_t second_step) const {
    const auto m = static_cast<int64_t>(first_.size()), n = static_cast<int64_t>(second_.size());
    int64_t i = first % m, j = second % n, sum = 0;
    first_step %= m;
    second_step %= n;
    for (; count > 0; --count) {
      sum += first_[static_cast<size_t>(i)] * second_[static_cast<size_t>(j)];
      if ((i += first_step) >= m) i -= m;
      if ((j += second_step) >= n) j -= n;
    }
    return sum;
  }

  /// The tap's index in the filter's memory.
  [[nodiscard]] int64_t Tap(size_t i, int64_t r) const {
    return spec_.flip ? spec_.w[i + 2] - 1 - r : r;
  }

  /// The input position that output position o meets at tap r; false if it is padding.
  bool InputOf(const Sizes& out, size_t skip_out, const Sizes& tap, Sizes& in) const {
    for (size_t i = 0; i < spec_.spatial_rank(); ++i) {
      const int64_t at =
          out[skip_out + i] * spec_.stride[i] + tap[i] * spec_.dilation[i] - spec_.pre_padding[i];
      if (at < 0 || at >= spec_.x[i + 2]) return false;
      in[i + 2] = at;
    }
    return true;
  }

  void SetTap(const Sizes& tap, Sizes& w) const {
    for (size_t i = 0; i < tap.size(); ++i) w[i + 2] = Tap(i, tap[i]);
  }

  [[nodiscard]] int64_t Fprop(const Sizes& y) const {
    int64_t sum = 0;
    Sizes x(y.size()), w(y.size());
    x[0] = y[0];
    x[1] = y[1] / (spec_.w[0] / groups_) * spec_.w[1];
    w[0] = y[1];
    ForEach(Spatial(spec_.w), [&](const Sizes& tap) {
      if (!InputOf(y, 2, tap, x)) return;
      SetTap(tap, w);
      sum += Dot(spec_.w[1], Place(x_, x), x_[1], Place(w_, w), w_[1]);
    });
    return sum;
  }

  [[nodiscard]] int64_t Dgrad(const Sizes& x) const {
    int64_t sum = 0;
    Sizes y(x.size()), w(x.size());
    const int64_t per_group = spec_.w[0] / groups_;
    y[0] = x[0];
    y[1] = w[0] = x[1] / spec_.w[1] * per_group;
    w[1] = x[1] % spec_.w[1];
    ForEach(Spatial(spec_.w), [&](const Sizes& tap) {
      for (size_t i = 0; i < tap.size(); ++i) {
        const int64_t from = x[i + 2] + spec_.pre_padding[i] - tap[i] * spec_.dilation[i];
        if (from < 0 || from % spec_.stride[i] || from / spec_.stride[i] >= spec_.y[i + 2]) return;
        y[i + 2] = from / spec_.stride[i];
      }
      SetTap(tap, w);
      sum += Dot(per_group, Place(y_, y), y_[1], Place(w_, w), w_[0]);
    });
    return sum;
  }

  /// The innermost sum goes along the last dimension, as far as the tap meets the image.
  [[nodiscard]] int64_t Wgrad(const Sizes& w) const {
    int64_t sum = 0;
    const size_t last = spec_.spatial_rank() - 1;
    Sizes x(w.size()), y(w.size()), tap(spec_.spatial_rank());
    for (size_t i = 0; i < tap.size(); ++i) tap[i] = Tap(i, w[i + 2]);
    x[1] = w[0] / (spec_.w[0] / groups_) * spec_.w[1] + w[1];
    y[1] = w[0];

    const int64_t stride = spec_.stride[last];
    const int64_t shift = tap[last] * spec_.dilation[last] - spec_.pre_padding[last];
    const int64_t begin = shift < 0 ? (-shift + stride - 1) / stride : 0;
    const int64_t room = spec_.x[last + 2] - shift;  // positions o * stride below it are inside
    const int64_t end = std::min(spec_.y[last + 2], room <= 0 ? 0 : (room - 1) / stride + 1);
    if (begin >= end) return 0;

    Sizes outer = Spatial(spec_.y);
    outer[last] = 1;
    ForEach(outer, [&](Sizes out) {
      out[last] = begin;
      if (!InputOf(out, 0, tap, x)) return;
      std::copy(out.begin(), out.end(), y.begin() + 2);
      for (int64_t n = 0; n < spec_.y[0]; ++n) {
        x[0] = y[0] = n;
        sum += Dot(end - begin, Place(x_, x), stride * x_[last + 2], Place(y_, y), y_[last + 2]);
      }
    });
    return sum;
  }

  const ConvSpec& spec_;
  int64_t groups_;
  Sizes x_, w_, y_;  // strides
  std::vector<int> first_, second_;
};

double Activated(Activation activation, double x) {
  constexpr double kRootOfHalf = 0.70710678118654752440, kRootOf2OverPi = 0.79788456080286535588;
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kLeakyRelu:
      return x < 0 ? kLeak * x : x;
    case Activation::kGelu:
      return x * std::erfc(-x * kRootOfHalf) / 2;
    case Activation::kGeluTanh:
      return x * (1 + std::tanh(kRootOf2OverPi * (x + 0.044715 * x * x * x))) / 2;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kElu:
      return x < 0 ? std::expm1(x) : x;
    case Activation::kSoftplus:
      return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
  }
  throw Error(ErrorCode::kInternal, "an Activation is missing from Activated");
}

/// What the epilogue makes of a sum at a place of the result, which is also the residual's.
double Finished(const ConvSpec& spec, int64_t sum, int64_t place, int64_t channel) {
  const auto add = [&sum](bool present, Operand operand, int64_t at) {
    if (!present) return;
    const std::vector<int> pattern = Pattern(operand);
    sum += pattern[static_cast<size_t>(at) % pattern.size()];
  };
  add(spec.epilogue.residual, Operand::kResidual, place);
  add(spec.epilogue.bias, Operand::kBias, channel);
  return Activated(spec.epilogue.activation, static_cast<double>(sum));
}

}  // namespace

Sizes SizesOf(const ConvSpec& spec, Operand operand) {
  const Sizes* const sizes[3][3] = {
      {&spec.x, &spec.w, &spec.y}, {&spec.y, &spec.w, &spec.x}, {&spec.x, &spec.y, &spec.w}};
  const auto& [first, second, result] = sizes[static_cast<size_t>(spec.op)];
  switch (operand) {
    case Operand::kFirst:
      return *first;
    case Operand::kSecond:
      return *second;
    case Operand::kResult:
      return *result;
    case Operand::kResidual:
      return spec.epilogue.residual ? *result : Sizes{};
    case Operand::kBias: {
      if (!spec.epilogue.bias) return {};
      Sizes bias(result->size(), 1);
      bias[1] = (*result)[1];
      return bias;
    }
  }
  throw Error(ErrorCode::kInternal, "an Operand is missing from SizesOf");
}

int64_t BytesOf(const ConvSpec& spec, Operand operand) {
  const Sizes sizes = SizesOf(spec, operand);
  return sizes.empty() ? 0 : Count(sizes) * RowOf(spec.dtype).bytes;
}

int64_t BytesOf(const ConvSpec& spec) {
  int64_t bytes = 0;
  for (Operand operand : kAllOperands) bytes += BytesOf(spec, operand);
  return bytes;
}

std::vector<int> Pattern(Operand operand) {
  // Primes; and the numbers of a linear congruential generator, between -2 and 2.
  constexpr size_t kPeriods[] = {8191, 8179, 1, 8171, 8167};
  std::vector<int> values(kPeriods[static_cast<size_t>(operand)]);
  uint32_t state = static_cast<uint32_t>(operand) + 1;
  for (int& value : values) {
    state = state * 1664525 + 1013904223;
    value = static_cast<int>((state >> 24) % 5) - 2;
  }
  return values;
}

std::vector<unsigned char> Encode(const std::vector<int>& values, DataType dtype) {
  const Format format = FormatOf(dtype);
  const auto bytes = static_cast<size_t>(RowOf(dtype).bytes);
  std::vector<unsigned char> encoded(values.size() * bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    uint64_t bits = 0;
    if (values[i] != 0) {
      int exponent = 0;
      const double fraction = std::frexp(std::abs(values[i]), &exponent);  // in [0.5, 1)
      const int bias = (1 << (format.exponent_bits - 1)) - 1;
      bits = static_cast<uint64_t>(exponent - 1 + bias) << format.fraction_bits;
      bits |= static_cast<uint64_t>(std::ldexp(2 * fraction - 1, format.fraction_bits));
      if (values[i] < 0) bits |= uint64_t{1} << (format.exponent_bits + format.fraction_bits);
    }
    std::memcpy(&encoded[i * bytes], &bits, bytes);  // little-endian, as every GPU's host is
  }
  return encoded;
}

double Decode(const unsigned char* bytes, DataType dtype) {
  const Format format = FormatOf(dtype);
  uint64_t bits = 0;
  std::memcpy(&bits, bytes, static_cast<size_t>(RowOf(dtype).bytes));
  const uint64_t one = 1;
  const int most = (1 << format.exponent_bits) - 1, bias = most / 2;
  const auto exponent =
      static_cast<int>((bits >> format.fraction_bits) & static_cast<uint64_t>(most));
  const double fraction = std::ldexp(
      static_cast<double>(bits & ((one << format.fraction_bits) - 1)), -format.fraction_bits);
  const double sign = (bits >> (format.exponent_bits + format.fraction_bits)) & 1 ? -1 : 1;
  if (exponent == most) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, exponent - bias);
}

std::vector<Sample> Samples(const ConvSpec& spec) {
  const Definition definition(spec);
  const Sizes sizes = SizesOf(spec, Operand::kResult);
  const Sizes strides = Strides(spec, sizes);
  const int64_t elements = Count(sizes);
  const int64_t affordable = kMostProducts / std::max<int64_t>(definition.Products(), 1);
  const int64_t fewest = definition.Products() > kVeryLong ? 1 : kFewestSamples;
  const int64_t count = std::min(elements, std::clamp(affordable, fewest, kMostSamples));
  std::vector<Sample> samples;
  uint64_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    int64_t index = static_cast<int64_t>((state >> 20) % static_cast<uint64_t>(elements));
    if (i == 0) index = 0;
    if (i == 1) index = elements - 1;
    const Sizes at = IndicesOf(sizes, strides, index);
    samples.push_back({index, Finished(spec, definition.At(at), index, at[1])});
  }
  return samples;
}

Slack SlackOf(const ConvSpec& spec, bool may_round_sums) {
  if (may_round_sums) return Slack::kRoundsPartialSums;
  switch (spec.epilogue.activation) {
    case Activation::kNone:
    case Activation::kRelu:
      return Slack::kNone;
    default:
      return Slack::kActivation;
  }
}

bool Agrees(double computed, double exact, DataType dtype, Slack slack) {
  const Format format = FormatOf(dtype);
  const double largest =
      std::ldexp(2 - std::ldexp(1, -format.fraction_bits), (1 << (format.exponent_bits - 1)) - 1);
  if (std::abs(exact) > largest) return std::abs(computed) >= largest;
  const double unit = std::ldexp(1, -format.fraction_bits - 1);
  double allowed = unit * std::abs(exact);
  // Either is far from what a wrong plan computes, which is what counts.
  if (slack == Slack::kActivation) allowed = 4 * allowed + 0.004;
  if (slack == Slack::kRoundsPartialSums) allowed = 64 * allowed + 8;
  return std::abs(computed - exact) <= allowed;  // false for NaN
}

}  // namespace jaxcudnn
