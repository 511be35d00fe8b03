// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "planner.h"

namespace jaxcudnn {

/// Reads a custom call's attributes, which are also the arguments of the module's functions.
/// `Source` has members Text, Sizes, Flag and Number that give the value of a name, or throw.
template <typename Source>
[[nodiscard]] Problem ReadProblem(const Source& source) {
  Problem problem{
      {
          ConvOpFromName(source.Text("op")),
          source.Sizes("x"),
          source.Sizes("w"),
          source.Sizes("y"),
          source.Sizes("stride"),
          source.Sizes("pre_padding"),
          source.Sizes("post_padding"),
          source.Sizes("dilation"),
          source.Flag("flip"),
          DataTypeFromName(source.Text("dtype")),
          source.Flag("allow_tf32"),
          source.Flag("channels_first"),
          {ActivationFromName(source.Text("activation")), source.Flag("residual"),
           source.Flag("bias")},
      },
      {
          source.Text("algorithm"),
          source.Flag("deterministic"),
          source.Flag("allow_reduced_precision_reduction"),
          source.Flag("allow_runtime_compilation"),
          source.Text("exclude_engines"),
          source.Flag("verify"),
          source.Number("tuning_candidates"),
          source.Number("tuning_candidate_us"),
          source.Number("tuning_us"),
      },
      source.Number("workspace_limit"),
      kFullAlignment,
  };
  Validate(problem.spec);
  return problem;
}

}  // namespace jaxcudnn
