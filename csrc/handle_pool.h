// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudnn.h>

#include <mutex>

namespace jaxcudnn {

/// The one cuDNN handle of a device. cuDNN forbids two threads in one handle at a time; a mutex
/// costs nothing measurable beside an enqueue, a handle a thread 10 MiB and 2 ms.
class DeviceHandle {
 public:
  explicit DeviceHandle(cudnnHandle_t handle) : handle_(handle) {}
  DeviceHandle(const DeviceHandle&) = delete;  // owns the lock
  DeviceHandle& operator=(const DeviceHandle&) = delete;

 private:
  friend class HandleLease;
  std::mutex mutex_;
  cudnnHandle_t handle_;
};

/// Exclusive use of a device's handle, bound to `stream`, until the end of the scope.
class HandleLease {
 public:
  HandleLease(DeviceHandle& device, cudaStream_t stream);
  HandleLease(const HandleLease&) = delete;  // one lease, one lock
  HandleLease& operator=(const HandleLease&) = delete;
  [[nodiscard]] cudnnHandle_t get() const { return handle_; }

 private:
  std::lock_guard<std::mutex> lock_;
  cudnnHandle_t handle_;
};

/// Devices are numbered as CUDA numbers them in this process.
inline constexpr int kMaxDevices = 64;

/// The handle of `device`, created at the first call: cudnnCreate allocates, so this must not be
/// reached for the first time while a stream is being captured.
DeviceHandle& HandleOf(int device);

}  // namespace jaxcudnn
