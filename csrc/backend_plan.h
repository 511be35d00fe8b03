// SPDX-License-Identifier: Apache-2.0
//
// Included by planner.cc alone: cudnn_frontend takes most of a minute to compile.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "conv_graph.h"
#include "libraries.h"
#include "planner.h"

namespace jaxcudnn {

/// The names in the graph of the buffers, in their order.
inline std::array<int64_t, kOperands> UidsOf(ConvOp op) {
  switch (op) {
    case ConvOp::kFprop:
      return {kX, kW, kY, kResidual, kBias};
    case ConvOp::kDgrad:
      return {kY, kW, kX, kResidual, kBias};
    case ConvOp::kWgrad:
      return {kX, kY, kW, kResidual, kBias};
  }
  throw Error(ErrorCode::kInternal, "a ConvOp is missing from UidsOf");
}

/// A table of operand addresses for one execution. cuDNN refuses to change one that is finished, so
/// each execution makes its own; that is part of the price of an enqueue.
class VariantPack {
 public:
  /// Null buffers are left out.
  VariantPack(const std::array<int64_t, kOperands>& uids, const Buffers& buffers, void* workspace)
      : descriptor_(Create()) {
    std::array<int64_t, kOperands> names{};
    Buffers pointers{};
    size_t count = 0;
    for (size_t i = 0; i < kOperands; ++i) {
      if (!buffers[i]) continue;
      names[count] = uids[i];
      pointers[count++] = buffers[i];
    }
    Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, names.data());
    Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers.data());
    Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    CheckCudnn(Cudnn().finalize(get()), "finalizing a variant pack");
  }

  [[nodiscard]] cudnnBackendDescriptor_t get() const { return descriptor_.get(); }

 private:
  static cudnnBackendDescriptor_t Create() {
    cudnnBackendDescriptor_t descriptor = nullptr;
    CheckCudnn(Cudnn().create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &descriptor),
               "creating a variant pack");
    return descriptor;
  }

  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, size_t count,
           const void* values) {
    CheckCudnn(Cudnn().set_attribute(get(), name, type, static_cast<int64_t>(count), values),
               "filling a variant pack");
  }

  struct Destroy {
    void operator()(void* descriptor) const { (void)Cudnn().destroy_descriptor(descriptor); }
  };
  std::unique_ptr<void, Destroy> descriptor_;
};

/// Executes through the backend directly, past the frontend's maps and shared pointers, which cost
/// more host time a call than all of this extension.
class BackendPlan final : public Plan {
 public:
  void set_host_bytes(int64_t bytes) { host_bytes_ = bytes; }

  BackendPlan(FoundPlan found, DeviceProperties properties, ConvOp op, Origin origin)
      : plan_(std::move(found.plan)), properties_(std::move(properties)), uids_(UidsOf(op)) {
    name_ = std::move(found.name);
    origin_ = std::move(origin);
    workspace_size_ = plan_->getWorkspaceSize();
    for (cudnnBackendNumericalNote_t note : plan_->getAllNumericNotes()) {
      notes_.push_back(fe::to_string(note));
    }
    for (cudnnBackendBehaviorNote_t note : plan_->getAllBehaviorNotes()) {
      notes_.push_back(fe::to_string(note));
    }
  }

  void Execute(cudnnHandle_t handle, const Buffers& buffers, void* workspace) const override {
    const VariantPack pack(uids_, buffers, workspace);
    CheckCudnn(Cudnn().execute(handle, plan_->get_raw_desc(), pack.get()),
               "executing a convolution");
  }

 private:
  std::shared_ptr<fe::ExecutionPlan> plan_;
  DeviceProperties properties_;  // outlives the plan that was made from it
  std::array<int64_t, kOperands> uids_;
};

}  // namespace jaxcudnn
