// SPDX-License-Identifier: Apache-2.0
#include "handle_pool.h"

#include <array>
#include <atomic>
#include <string>

#include "error.h"
#include "libraries.h"

namespace jaxcudnn {
namespace {

// Leaked on purpose, like the handles: at exit the driver may be gone before static destructors
// run.
std::array<std::atomic<DeviceHandle*>, kMaxDevices>& Handles() {
  static auto* handles = new std::array<std::atomic<DeviceHandle*>, kMaxDevices>{};
  return *handles;
}

DeviceHandle* Create(int device) {
  DeviceScope scope(device);
  cudnnHandle_t handle = nullptr;
  CheckCudnn(Cudnn().create(&handle), "cudnnCreate");
  return new DeviceHandle(handle);
}

}  // namespace

DeviceHandle& HandleOf(int device) {
  if (device < 0 || device >= kMaxDevices) {
    throw Error(ErrorCode::kInvalidArgument, "device must be in [0, " +
                                                 std::to_string(kMaxDevices) + "), got " +
                                                 std::to_string(device));
  }
  std::atomic<DeviceHandle*>& slot = Handles()[static_cast<size_t>(device)];
  if (DeviceHandle* handle = slot.load(std::memory_order_acquire)) return *handle;
  static std::mutex* creating = new std::mutex;
  std::lock_guard<std::mutex> lock(*creating);
  if (DeviceHandle* handle = slot.load(std::memory_order_relaxed)) return *handle;
  DeviceHandle* created = Create(device);
  slot.store(created, std::memory_order_release);
  return *created;
}

HandleLease::HandleLease(DeviceHandle& device, cudaStream_t stream)
    : lock_(device.mutex_), handle_(device.handle_) {
  // Every time, though it costs 0.3 us: XLA makes and destroys streams to record on, so an equal
  // pointer need not be the same stream.
  CheckCudnn(Cudnn().set_stream(handle_, stream), "cudnnSetStream");
}

}  // namespace jaxcudnn
