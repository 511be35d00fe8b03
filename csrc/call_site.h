// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "conv_spec.h"
#include "handle_pool.h"
#include "planner.h"
#include "tuner.h"

namespace jaxcudnn {

/// Bytes of the buffers, in their order; 0 where there is none.
using BufferSizes = std::array<int64_t, kOperands>;

/// The workspace that XLA reserved for a call.
struct Workspace {
  void* data;
  int64_t bytes;
};

/// One custom call of one executable: what it computes, and the plans with which it does so on each
/// device. Shared by all devices and all concurrent runs of the executable.
///
/// XLA may place an operand or the result inside a larger array, at an address that cuDNN's fast
/// plans refuse. Such buffers are copied to and from what the plan leaves of the workspace; when
/// they do not fit there, a plan for any address takes over.
class CallSite {
 public:
  explicit CallSite(Problem problem);

  [[nodiscard]] const Epilogue& epilogue() const { return problem_.spec.epilogue; }

  /// Throws kInvalidArgument unless the buffers hold as much as the attributes say: a call written
  /// by hand could otherwise read and write past them.
  void CheckSizes(const BufferSizes& bytes) const;

  /// Makes sure that `Execute` with these buffers will find its plan and its handle. May allocate,
  /// build, measure and take a second at the first call; afterwards it is one look-up.
  void Prepare(const Bench& bench, const Buffers& buffers, const Workspace& workspace);

  /// Enqueues the convolution; only legal after Prepare with equally aligned buffers.
  void Execute(int device, cudaStream_t stream, const Buffers& buffers,
               const Workspace& workspace) const;

 private:
  enum Kind { kFast, kAnyAddress, kKinds };
  using Slots = std::array<std::atomic<const Plan*>, kKinds>;

  const Plan& PreparePlan(Kind kind, const Bench& bench, const Workspace& workspace);
  [[nodiscard]] const Plan& PreparedPlan(Kind kind, int device) const;
  [[nodiscard]] PlanPointer FindPlan(Kind kind, const Bench& bench,
                                     const Workspace& workspace) const;
  [[nodiscard]] bool Relocate(const Plan& plan, const Workspace& workspace, Buffers& buffers) const;

  Problem problem_;
  BufferSizes bytes_;                       // of the buffers, in their order
  std::array<Slots, kMaxDevices> plans_{};  // read without a lock by Execute
  std::mutex mutex_;                        // guards owned_
  std::vector<PlanPointer> owned_;          // a plan lives as long as its executable
};

/// A call site that may learn only from its buffers how many images there are. XLA fixes the sizes
/// of a program's arrays when it compiles it, but attributes are as they were when the program was
/// saved, perhaps for any number of images.
class LateCallSite {
 public:
  /// Throws kInvalidArgument unless the problem is one for some number of images.
  explicit LateCallSite(Problem problem);
  LateCallSite(LateCallSite&& other) = delete;  // others hold its address

  /// The call site for a first operand of so many elements.
  CallSite& ForElements(int64_t elements);

  /// What `ForElements` gave. Throws kFailedPrecondition if it was never called.
  [[nodiscard]] const CallSite& known() const;

 private:
  Problem problem_;
  std::mutex mutex_;  // held while site_ is made
  std::unique_ptr<CallSite> owned_;
  std::atomic<CallSite*> site_{nullptr};
};

}  // namespace jaxcudnn
