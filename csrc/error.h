// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace jaxcudnn {

/// What went wrong, in the terms in which the FFI boundary reports it.
enum class ErrorCode {
  kInvalidArgument,     ///< the attributes do not describe a convolution
  kUnsupported,         ///< cuDNN has no plan for this convolution; asking again will not help
  kResourceExhausted,   ///< plans exist, but none within the memory given
  kFailedPrecondition,  ///< a library is missing, or a stage was skipped
  kInternal,            ///< cuDNN or CUDA reported a failure
};

/// The one exception type of this extension. Everything inside throws; the FFI handlers and
/// nanobind each translate it once.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace jaxcudnn
