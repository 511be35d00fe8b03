// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "conv_spec.h"

namespace jaxcudnn {

/// Which of the two operands, or the result, of an operation.
enum class Operand { kFirst, kSecond, kResult };

/// The sizes of x, w or y, whichever `operand` of the operation is.
[[nodiscard]] const std::vector<int64_t>& SizesOf(const ConvSpec& spec, Operand operand);

/// Small integers that fill an operand, repeated with a period that is prime, so that no stride of
/// an array meets the same number again and again. Their sums are exact in float32.
[[nodiscard]] std::vector<int> Pattern(Operand operand);

/// The bytes of numbers of a dtype; and back, as float64.
[[nodiscard]] std::vector<unsigned char> Encode(const std::vector<int>& values, DataType dtype);
[[nodiscard]] double Decode(const unsigned char* bytes, DataType dtype);

/// One element of a result: where it is in memory, and the sum that the definition of the
/// convolution gives for operands filled with `Pattern`.
struct Sample {
  int64_t index;
  double exact;
};

/// Some elements of the result, its first and its last among them; fewer where sums are long.
[[nodiscard]] std::vector<Sample> Samples(const ConvSpec& spec);

/// Whether a computed element is the exact sum, rounded once to the dtype, or where partial sums
/// may be rounded, near it.
[[nodiscard]] bool Agrees(double computed, double exact, DataType dtype, bool may_round_sums);

}  // namespace jaxcudnn
