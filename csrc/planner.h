// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "host_reference.h"
#include "plan_request.h"

namespace jaxcudnn {

/// The alignment of everything that XLA allocates and cuDNN's tensor-core kernels ask for.
inline constexpr int64_t kFullAlignment = 16;

/// The two operands of the operation, then its result: x w y, dy w dx or x dy dw. Then residual and
/// bias, null where the epilogue has none.
using Buffers = std::array<void*, kOperands>;

/// How a plan came to be chosen.
struct Origin {
  std::string source = "heuristic";  ///< or "named", "measured", "stored"
  double microseconds = std::numeric_limits<double>::quiet_NaN();  ///< NaN if it was never timed
  int64_t tried = 0;                                               ///< plans timed to choose it
};

/// A finished cuDNN execution plan: immutable, and shared by every thread and call site.
class Plan {
 public:
  virtual ~Plan() = default;

  /// cuDNN's engine and knobs, such as "eng62_k2=0_k13=1".
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int64_t workspace_size() const { return workspace_size_; }
  /// cuDNN's numerical and behaviour notes, by name.
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }
  [[nodiscard]] const Origin& origin() const { return origin_; }
  /// By how much this process's allocated memory grew while the plan was built.
  [[nodiscard]] int64_t host_bytes() const { return host_bytes_; }

  /// Enqueues the convolution on the handle's stream. Legal while that stream is captured: it
  /// allocates no device memory, waits for nothing and builds nothing.
  virtual void Execute(cudnnHandle_t handle, const Buffers& buffers, void* workspace) const = 0;

 protected:
  std::string name_;
  int64_t workspace_size_ = 0;
  std::vector<std::string> notes_;
  Origin origin_;
  int64_t host_bytes_ = 0;
};

using PlanPointer = std::shared_ptr<const Plan>;

/// Builds plans for one GPU. Every function throws kUnsupported when cuDNN has no plan at all that
/// the options allow, and kResourceExhausted when only the workspace limit is in the way.
class Planner {
 public:
  virtual ~Planner() = default;

  /// The first plan in cuDNN's order.
  [[nodiscard]] virtual PlanPointer First(const Problem& problem) const = 0;
  /// The plan of this name; throws kInvalidArgument with the nearest names if there is none.
  [[nodiscard]] virtual PlanPointer Named(const Problem& problem, std::string_view name,
                                          const Origin& origin) const = 0;
  /// All that `problem.options` wants timed, in cuDNN's order, those compiled at run time last.
  [[nodiscard]] virtual std::vector<PlanPointer> Candidates(const Problem& problem) const = 0;
  /// The first that cuDNN compiles at run time; null if there is none.
  [[nodiscard]] virtual PlanPointer Compiled(const Problem& problem) const = 0;
};

/// The planner of a device of this process.
const Planner& PlannerOf(int device);

/// A planner for a GPU that is described by cuDNN's JSON and need not exist. Its plans are for
/// tests of planning: they run several times slower than they should.
std::unique_ptr<const Planner> PlannerFromProperties(const std::string& properties_json);

}  // namespace jaxcudnn
