// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "conv_spec.h"
#include "fields.h"

namespace jaxcudnn {

/// How a plan is chosen, and which may be: what Python's `Options` says.
struct PlanOptions {
  std::string algorithm;  ///< "heuristic", "measure", "exhaustive" or a plan's name
  bool deterministic;
  bool allow_reduced_precision_reduction;
  bool allow_runtime_compilation;
  std::string exclude_engines;  ///< such as "eng5,eng57"
  bool verify;
  int64_t tuning_candidates;    ///< plans that are timed at most
  int64_t tuning_candidate_us;  ///< for each, its first run apart
  int64_t tuning_us;            ///< after which no further plan is begun

  [[nodiscard]] auto fields() const {
    return std::make_tuple(
        Field{"algorithm", algorithm}, Field{"deterministic", deterministic},
        Field{"allow_reduced_precision_reduction", allow_reduced_precision_reduction},
        Field{"allow_runtime_compilation", allow_runtime_compilation},
        Field{"exclude_engines", exclude_engines}, Field{"verify", verify},
        Field{"tuning_candidates", tuning_candidates},
        Field{"tuning_candidate_us", tuning_candidate_us}, Field{"tuning_us", tuning_us});
  }

  [[nodiscard]] bool is_exhaustive() const { return algorithm == "exhaustive"; }
  [[nodiscard]] bool is_measured() const { return algorithm == "measure" || is_exhaustive(); }
  [[nodiscard]] bool is_named() const { return !is_measured() && algorithm != "heuristic"; }
};

/// What a plan is chosen for, wherever it runs.
struct Problem {
  ConvSpec spec;
  PlanOptions options;
  int64_t workspace_limit;  ///< bytes; plans that need more are not considered
  int64_t alignment;        ///< bytes; every operand's address is a multiple of it

  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"spec", spec}, Field{"options", options},
                           Field{"workspace_limit", workspace_limit},
                           Field{"alignment", alignment});
  }
};

/// What a plan is built for. It is the key under which the plan is kept.
struct PlanRequest {
  Problem problem;
  int device;  ///< as CUDA numbers it in this process

  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"problem", problem}, Field{"device", device});
  }
};

}  // namespace jaxcudnn
