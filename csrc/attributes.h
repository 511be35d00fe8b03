// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "planner.h"

namespace jaxcudnn {

/// The newest schema of a custom call's attributes, and the one that Python writes. A program names
/// its own, if that is not the first, in the attribute `schema`.
///
///   1  all that are read without a default below.
///   2  x and y may say 0 for the number of images: as many as the buffers hold.
///
/// An attribute that a later schema adds gets a default, with which older programs mean what they
/// meant. What older programs would have to mean otherwise takes another target (_load.py).
inline constexpr int64_t kSchema = 2;

/// Throws kFailedPrecondition for a schema that this extension does not know.
inline void CheckSchema(int64_t schema) {
  if (schema >= 1 && schema <= kSchema) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "the program was saved with schema " + std::to_string(schema) +
                  " of jaxcudnn's custom call, and the jaxcudnn that loads it reads schemas 1 to " +
                  std::to_string(kSchema) +
                  "; load it with the jaxcudnn that saved it, or a newer one");
}

/// Reads a custom call's attributes, which are also the arguments of the module's functions.
/// `Source` has members Text, Sizes, Flag and Number that give the value of a name, or throw; given
/// a default, they may give that for a name that there is not. Nothing is validated.
template <typename Source>
[[nodiscard]] Problem ReadProblem(const Source& source) {
  return {
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
          source.Flag("channels_first", false),
          {ActivationFromName(source.Text("activation", "")), source.Flag("residual", false),
           source.Flag("bias", false)},
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
}

}  // namespace jaxcudnn
