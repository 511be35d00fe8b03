// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace jaxcudnn {

/// The driver's name of a device, such as "NVIDIA H200".
[[nodiscard]] std::string DeviceName(int device);

/// The few functions of the CUDA runtime that are called without XLA or cuDNN.
struct CudaRuntime {
  decltype(&::cudaGetDevice) get_device;
  decltype(&::cudaSetDevice) set_device;
  decltype(&::cudaDeviceGetAttribute) get_attribute;
  decltype(&::cudaMemcpyAsync) memcpy_async;
  decltype(&::cudaMemsetAsync) memset_async;
  decltype(&::cudaStreamIsCapturing) stream_is_capturing;
  decltype(&::cudaStreamCreateWithFlags) stream_create;
  decltype(&::cudaStreamDestroy) stream_destroy;
  decltype(&::cudaStreamSynchronize) stream_synchronize;
  decltype(&::cudaEventCreateWithFlags) event_create;
  decltype(&::cudaEventDestroy) event_destroy;
  decltype(&::cudaEventRecord) event_record;
  decltype(&::cudaEventSynchronize) event_synchronize;
  decltype(&::cudaEventElapsedTime) event_elapsed_time;
  decltype(&::cudaLaunchHostFunc) launch_host_function;
};

const CudaRuntime& Cudart();

/// Throws kInternal with CUDA's number unless `status` is success.
void CheckCuda(cudaError_t status, const char* what);

/// A stream of a device that waits for no other.
class OwnStream {
 public:
  explicit OwnStream(int device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;  // owns the stream
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace jaxcudnn
