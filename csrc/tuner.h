// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <driver_types.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "planner.h"
#include "tuning.h"

namespace jaxcudnn {

/// Where plans are measured: a device, a stream on which its memory may be used, and the memory.
struct Bench {
  int device;
  cudaStream_t stream;
  /// Gives so many bytes of device memory until the measuring is over, or null.
  std::function<void*(size_t)> allocate;
};

/// What measuring found.
struct Tuning {
  size_t fastest = kNone;  ///< index among the candidates; kNone if none could be timed
  std::vector<Timing> timings;
  double milliseconds = 0;  ///< what it cost

  [[nodiscard]] int64_t tried() const;
};

/// How much memory timing all candidates takes.
[[nodiscard]] size_t BytesToTune(const Problem& problem,
                                 const std::vector<PlanPointer>& candidates);

/// Times the candidates on arrays of their own, on the bench's stream: XLA's memory is protected by
/// that stream's order alone. Those whose workspace does not fit are left out when memory is short.
/// Waits for the stream. Must not be called while the stream is being captured.
Tuning Tune(const Problem& problem, const std::vector<PlanPointer>& candidates, const Bench& bench);

}  // namespace jaxcudnn
