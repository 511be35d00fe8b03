// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <tuple>

#include "conv_spec.h"
#include "fields.h"

namespace jaxcudnn {

/// What a plan is built for. It is the key under which the plan is kept.
struct PlanRequest {
  ConvSpec spec;
  int64_t workspace_limit;  ///< bytes; plans that need more are not considered
  int64_t alignment;        ///< bytes; every operand's address is a multiple of it
  int device;               ///< as CUDA numbers it in this process

  [[nodiscard]] auto fields() const {
    return std::make_tuple(Field{"spec", spec}, Field{"workspace_limit", workspace_limit},
                           Field{"alignment", alignment}, Field{"device", device});
  }
};

}  // namespace jaxcudnn
