// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string_view>

#include "conv_spec.h"

namespace jaxcudnn {

/// The engine in a plan's name: "eng20" of "eng20_k2=6_k3=0".
[[nodiscard]] inline std::string_view EngineOf(std::string_view plan_name) {
  return plan_name.substr(0, plan_name.find('_'));
}

/// Whether a list such as "eng5,eng57" has the engine.
[[nodiscard]] inline bool Lists(std::string_view engines, std::string_view engine) {
  while (!engines.empty()) {
    const size_t comma = engines.find(',');
    if (engines.substr(0, comma) == engine) return true;
    engines = comma == std::string_view::npos ? "" : engines.substr(comma + 1);
  }
  return false;
}

/// Whether cuDNN offers this plan and it computes something else. docs/decisions.md says how such
/// plans were found; benchmarks/plan_survey.py finds more.
[[nodiscard]] inline bool ComputesWrongNumbers(const ConvSpec& spec, std::string_view plan_name) {
  // Engines 1 and 20 take the low padding for the high one too (cuDNN 9.19 on an H200: wrong in 453
  // of 557 filter gradients with asymmetric padding, right in all 40 with symmetric padding).
  constexpr std::string_view kIgnoreHighPadding[] = {"eng1", "eng20"};
  // Engine 61 (depthwise filter gradients) keeps partial sums in the arrays' dtype, so that float16
  // results err by up to 0.6 % (the same cuDNN); in float32 it is right.
  constexpr std::string_view kRoundsPartialSums = "eng61";
  if (spec.op != ConvOp::kWgrad) return false;
  const std::string_view engine = EngineOf(plan_name);
  if (engine == kRoundsPartialSums) return RowOf(spec.dtype).bytes == 2;
  return spec.pre_padding != spec.post_padding &&
         std::count(std::begin(kIgnoreHighPadding), std::end(kIgnoreHighPadding), engine) > 0;
}

}  // namespace jaxcudnn
