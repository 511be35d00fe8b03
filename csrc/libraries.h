// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudnn.h>
#include <driver_types.h>

#include <string>
#include <vector>

#include "known_faults.h"

namespace jaxcudnn {

/// The oldest cuDNN that this extension drives: the first whose plans need no handle.
inline constexpr size_t kOldestCudnn = 90800;

/// A cuDNN that has been found in this process, and the few functions called without
/// cudnn_frontend. The extension links neither cuDNN nor the CUDA runtime, so that one binary
/// serves CUDA 12, CUDA 13 and machines that have neither.
struct CudnnLibrary {
  void* handle;
  std::string path;
  size_t version;  ///< as cudnnGetVersion gives it: 91900 is 9.19.0

  decltype(&::cudnnCreate) create;
  decltype(&::cudnnSetStream) set_stream;
  decltype(&::cudnnGetErrorString) error_string;
  decltype(&::cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&::cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&::cudnnBackendSetAttribute) set_attribute;
  decltype(&::cudnnBackendFinalize) finalize;
  decltype(&::cudnnBackendExecute) execute;
};

/// Finds cuDNN: the copy already in the process (which is the one JAX uses), else each of `paths`
/// in turn, else wherever the dynamic linker looks. Later calls return what the first one found.
/// Throws kFailedPrecondition with every place that was tried.
const CudnnLibrary& LoadCudnn(const std::vector<std::string>& paths);

/// The cuDNN that LoadCudnn found, looking it up without further paths if nobody has called it.
const CudnnLibrary& Cudnn();

/// A device of this process, and the versions that would run there.
[[nodiscard]] Target TargetOf(int device);

/// The version of the cuBLASLt in use: 130601 is 13.6.1. 0 if there is none, or it does not say.
[[nodiscard]] size_t CublasLtVersion();

/// Throws kInternal with cuDNN's own words unless `status` is success.
void CheckCudnn(cudnnStatus_t status, const char* what);

/// Enqueues a copy within the device's memory; legal while the stream is captured.
void CopyOnDevice(void* to, const void* from, size_t bytes, cudaStream_t stream);

inline constexpr int kNoDevice = -1;

/// Makes `device` current on this thread until the end of the scope; kNoDevice changes nothing.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;  // one scope restores one device
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace jaxcudnn
