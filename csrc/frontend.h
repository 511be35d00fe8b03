// SPDX-License-Identifier: Apache-2.0
//
// jaxcudnn's dtypes and errors in cudnn_frontend's words. Included by planner.cc alone, with
// conv_graph.h: cudnn_frontend takes most of a minute to compile.
#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <string>

#include "dtypes.h"
#include "error.h"

namespace jaxcudnn {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using DeviceProperties = std::shared_ptr<const fe::DeviceProperties>;

// cuDNN's messages can run to many lines; the first few hundred characters name the cause.
inline constexpr size_t kLongestReason = 400;

inline void CheckFrontend(fe::error_t status, const char* what) {
  if (status.is_good()) return;
  const bool unsupported = status.get_code() == fe::error_code_t::GRAPH_NOT_SUPPORTED;
  throw Error(unsupported ? ErrorCode::kUnsupported : ErrorCode::kInternal,
              std::string(what) + " failed: " + status.get_message().substr(0, kLongestReason));
}

inline fe::DataType_t ToFrontend(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return fe::DataType_t::HALF;
    case DataType::kBFloat16:
      return fe::DataType_t::BFLOAT16;
    case DataType::kFloat32:
      return fe::DataType_t::FLOAT;
    case DataType::kFloat64:
      return fe::DataType_t::DOUBLE;
  }
  throw Error(ErrorCode::kInternal, "a DataType is missing from ToFrontend");
}

/// What products are summed in.
inline fe::DataType_t Accumulator(DataType type) {
  return type == DataType::kFloat64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
}

}  // namespace jaxcudnn
