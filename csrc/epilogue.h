// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "error.h"
#include "fields.h"

namespace jaxcudnn {

/// What is applied to each sum. A new one needs a row in `kActivations`, a case in conv_graph.h and
/// one in host_reference.cc.
enum class Activation {
  kNone,
  kRelu,
  kLeakyRelu,  ///< of slope 0.01
  kGelu,       ///< by the error function
  kGeluTanh,   ///< its approximation by tanh
  kSilu,
  kElu,
  kSoftplus,
  kTanh,
  kSigmoid
};

struct ActivationRow {
  Activation activation;
  std::string_view name;  ///< as Python has it
};

inline constexpr ActivationRow kActivations[] = {
    {Activation::kNone, ""},
    {Activation::kRelu, "relu"},
    {Activation::kLeakyRelu, "leaky_relu"},
    {Activation::kGelu, "gelu"},
    {Activation::kGeluTanh, "gelu_tanh"},
    {Activation::kSilu, "silu"},
    {Activation::kElu, "elu"},
    {Activation::kSoftplus, "softplus"},
    {Activation::kTanh, "tanh"},
    {Activation::kSigmoid, "sigmoid"},
};

inline constexpr double kLeak = 0.01;  // the slope of kLeakyRelu below zero

[[nodiscard]] inline std::string_view NameOf(Activation activation) {
  for (const ActivationRow& row : kActivations) {
    if (row.activation == activation) return row.name;
  }
  throw Error(ErrorCode::kInternal, "an Activation is missing from kActivations");
}

[[nodiscard]] inline Activation ActivationFromName(std::string_view name) {
  for (const ActivationRow& row : kActivations) {
    if (row.name == name) return row.activation;
  }
  throw Error(ErrorCode::kInvalidArgument, "unknown activation '" + std::string(name) + "'");
}

/// What becomes of a convolution's sums before they are rounded: activation(sum + residual + bias).
struct Epilogue {
  Activation activation = Activation::kNone;
  bool residual = false;  ///< an array like the result is added
  bool bias = false;      ///< a number for each of the result's channels is added

  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"activation", activation}, Field{"residual", residual},
                           Field{"bias", bias});
  }

  [[nodiscard]] bool is_empty() const {
    return activation == Activation::kNone && !residual && !bias;
  }
};

}  // namespace jaxcudnn
