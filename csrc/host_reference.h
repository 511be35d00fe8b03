// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "conv_spec.h"

namespace jaxcudnn {

/// Which of the arrays of a call.
enum class Operand : size_t { kFirst, kSecond, kResult, kResidual, kBias };
inline constexpr size_t kOperands = 5;
inline constexpr Operand kAllOperands[] = {Operand::kFirst, Operand::kSecond, Operand::kResult,
                                           Operand::kResidual, Operand::kBias};

/// The sizes of x, w or y, whichever `operand` of the operation is, of the residual, or 1 K 1...
/// for a bias of K numbers; none of what the epilogue does not have.
[[nodiscard]] std::vector<int64_t> SizesOf(const ConvSpec& spec, Operand operand);

/// How many bytes it has, and all of them have.
[[nodiscard]] int64_t BytesOf(const ConvSpec& spec, Operand operand);
[[nodiscard]] int64_t BytesOf(const ConvSpec& spec);

/// Small integers that fill an operand, repeated with a period that is prime, so that no stride of
/// an array meets the same number again and again. Their sums are exact in float32.
[[nodiscard]] std::vector<int> Pattern(Operand operand);

/// The bytes of numbers of a dtype; and back, as float64.
[[nodiscard]] std::vector<unsigned char> Encode(const std::vector<int>& values, DataType dtype);
[[nodiscard]] double Decode(const unsigned char* bytes, DataType dtype);

/// One element of a result: where it is in memory, and what the definition of the convolution and
/// its epilogue gives for operands filled with `Pattern`.
struct Sample {
  int64_t index;
  double exact;
};

/// Some elements of the result, its first and its last among them; fewer where sums are long.
[[nodiscard]] std::vector<Sample> Samples(const ConvSpec& spec);

/// How near a computed element has to be to the exact one, beside one rounding to the dtype.
enum class Slack {
  kNone,
  kActivation,         ///< approximated by the hardware
  kRoundsPartialSums,  ///< each of many, in the dtype
};

[[nodiscard]] Slack SlackOf(const ConvSpec& spec, bool may_round_sums);

/// Whether a computed element is the exact one, so far as a plan is bound to give it.
[[nodiscard]] bool Agrees(double computed, double exact, DataType dtype, Slack slack);

}  // namespace jaxcudnn
