// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan_request.h"

namespace jaxcudnn {

/// The alignment of everything that XLA allocates and cuDNN's tensor-core kernels ask for.
inline constexpr int64_t kFullAlignment = 16;

/// The two operands of the operation, then its result: x w y, dy w dx or x dy dw.
using Buffers = std::array<void*, 3>;

/// A finished cuDNN execution plan: immutable, and shared by every thread and call site.
class Plan {
 public:
  virtual ~Plan() = default;

  /// cuDNN's engine and knobs, such as "eng62_k2=0_k13=1".
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int64_t workspace_size() const { return workspace_size_; }
  /// cuDNN's numerical and behaviour notes, by name.
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

  /// Enqueues the convolution on the handle's stream. Legal while that stream is captured: it
  /// allocates no device memory, waits for nothing and builds nothing.
  virtual void Execute(cudnnHandle_t handle, const Buffers& buffers, void* workspace) const = 0;

 protected:
  std::string name_;
  int64_t workspace_size_ = 0;
  std::vector<std::string> notes_;
};

/// Builds the first plan that cuDNN's heuristics offer within the request's limits, for the device
/// itself. Throws kUnsupported when cuDNN has none at all, kResourceExhausted when only the
/// workspace limit is in the way.
std::shared_ptr<const Plan> BuildPlan(const PlanRequest& request);

/// The same for a GPU that is described by cuDNN's JSON and need not exist (`request.device` is
/// ignored). Such plans are for tests of planning: they run several times slower than they should.
std::shared_ptr<const Plan> BuildPlanFromProperties(const PlanRequest& request,
                                                    const std::string& properties_json);

}  // namespace jaxcudnn
