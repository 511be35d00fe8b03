// SPDX-License-Identifier: Apache-2.0
#include "libraries.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <memory>
#include <mutex>

#include "cudart.h"
#include "error.h"
#include "version_text.h"

namespace jaxcudnn {
namespace {

constexpr const char* kCudnnName = "libcudnn.so.9";
constexpr const char* kDriverNames[] = {"libcuda.so.1"};
constexpr const char* kCudartNames[] = {"libcudart.so.13", "libcudart.so.12"};
// cuDNN opens cuBLASLt at its first use and ends the process when it cannot.
constexpr const char* kCublasLtNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

std::string LastLinkerError() {
  const char* text = dlerror();
  return text ? text : "unknown error";
}

/// `owner` is what the message calls the library.
template <typename Function>
Function Symbol(void* library, const char* name, const std::string& owner) {
  void* symbol = dlsym(library, name);
  if (!symbol) throw Error(ErrorCode::kFailedPrecondition, owner + " has no function " + name);
  return reinterpret_cast<Function>(symbol);
}

/// The first of `names` that is in the process already, else the first that the linker finds.
template <size_t n>
void* OpenOneOf(const char* const (&names)[n]) {
  for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : names) {
      if (void* library = dlopen(name, flags)) return library;
    }
  }
  return nullptr;
}

std::string PathOf(void* library) {
  const link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "unknown path";
}

void* OpenCudnn(const std::vector<std::string>& paths) {
  if (void* library = dlopen(kCudnnName, RTLD_NOW | RTLD_NOLOAD)) return library;
  if (!OpenOneOf(kCublasLtNames)) {
    throw Error(ErrorCode::kFailedPrecondition,
                "cuDNN 9 is not loaded and cannot be, since libcublasLt.so.13 and "
                "libcublasLt.so.12, one of which it needs, are neither loaded nor on the linker's "
                "path; install jax[cuda13] or jax[cuda12], which bring both");
  }
  std::string reasons;
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW)) return library;
    reasons += LastLinkerError() + ", ";
  }
  if (void* library = dlopen(kCudnnName, RTLD_NOW)) return library;
  throw Error(ErrorCode::kFailedPrecondition, "cuDNN 9 is not loaded and was not found (" +
                                                  reasons + LastLinkerError() +
                                                  "); install jax[cuda13] or jax[cuda12]");
}

std::unique_ptr<const CudnnLibrary> Open(const std::vector<std::string>& paths) {
  auto library = std::make_unique<CudnnLibrary>();
  void* handle = library->handle = OpenCudnn(paths);
  library->path = PathOf(handle);
  library->version = Symbol<decltype(&::cudnnGetVersion)>(handle, "cudnnGetVersion",
                                                          "cuDNN at " + library->path)();
  const std::string owner = "cuDNN " + VersionText(library->version) + " at " + library->path;
  if (library->version < kOldestCudnn) {
    throw Error(ErrorCode::kFailedPrecondition,
                owner + " is too old, jaxcudnn needs " + VersionText(kOldestCudnn) +
                    " or newer; upgrade nvidia-cudnn-cu13 or nvidia-cudnn-cu12");
  }
#define JAXCUDNN_SYMBOL(member, name) \
  library->member = Symbol<decltype(&::name)>(handle, #name, owner)
  JAXCUDNN_SYMBOL(create, cudnnCreate);
  JAXCUDNN_SYMBOL(set_stream, cudnnSetStream);
  JAXCUDNN_SYMBOL(error_string, cudnnGetErrorString);
  JAXCUDNN_SYMBOL(create_descriptor, cudnnBackendCreateDescriptor);
  JAXCUDNN_SYMBOL(destroy_descriptor, cudnnBackendDestroyDescriptor);
  JAXCUDNN_SYMBOL(set_attribute, cudnnBackendSetAttribute);
  JAXCUDNN_SYMBOL(finalize, cudnnBackendFinalize);
  JAXCUDNN_SYMBOL(execute, cudnnBackendExecute);
#undef JAXCUDNN_SYMBOL
  return library;
}

}  // namespace

const CudaRuntime& Cudart() {
  static const CudaRuntime runtime = [] {
    void* library = OpenOneOf(kCudartNames);
    if (!library) {
      throw Error(ErrorCode::kFailedPrecondition,
                  "the CUDA runtime (libcudart.so.13 or .12) was not found: " + LastLinkerError());
    }
    const std::string owner = "the CUDA runtime at " + PathOf(library);
    CudaRuntime found{};
#define JAXCUDNN_SYMBOL(member, name) \
  found.member = Symbol<decltype(&::name)>(library, #name, owner)
    JAXCUDNN_SYMBOL(get_device, cudaGetDevice);
    JAXCUDNN_SYMBOL(set_device, cudaSetDevice);
    JAXCUDNN_SYMBOL(get_attribute, cudaDeviceGetAttribute);
    JAXCUDNN_SYMBOL(memcpy_async, cudaMemcpyAsync);
    JAXCUDNN_SYMBOL(memset_async, cudaMemsetAsync);
    JAXCUDNN_SYMBOL(stream_is_capturing, cudaStreamIsCapturing);
    JAXCUDNN_SYMBOL(stream_create, cudaStreamCreateWithFlags);
    JAXCUDNN_SYMBOL(stream_destroy, cudaStreamDestroy);
    JAXCUDNN_SYMBOL(stream_synchronize, cudaStreamSynchronize);
    JAXCUDNN_SYMBOL(event_create, cudaEventCreateWithFlags);
    JAXCUDNN_SYMBOL(event_destroy, cudaEventDestroy);
    JAXCUDNN_SYMBOL(event_record, cudaEventRecord);
    JAXCUDNN_SYMBOL(event_synchronize, cudaEventSynchronize);
    JAXCUDNN_SYMBOL(event_elapsed_time, cudaEventElapsedTime);
    JAXCUDNN_SYMBOL(launch_host_function, cudaLaunchHostFunc);
#undef JAXCUDNN_SYMBOL
    return found;
  }();
  return runtime;
}

void CheckCuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kInternal,
                std::string(what) + " failed with CUDA error " + std::to_string(status));
  }
}

std::string DeviceName(int device) {
  // The driver's own function: what the runtime's returns differs between CUDA 12 and 13.
  using GetName = int(char*, int, int);
  static void* library = OpenOneOf(kDriverNames);
  if (!library) {
    throw Error(ErrorCode::kFailedPrecondition,
                "the CUDA driver was not found: " + LastLinkerError());
  }
  static auto* get_name = Symbol<GetName*>(library, "cuDeviceGetName", "the CUDA driver");
  std::array<char, 256> name{};
  if (const int status = get_name(name.data(), static_cast<int>(name.size()), device)) {
    throw Error(ErrorCode::kInternal,
                "cuDeviceGetName failed with CUDA error " + std::to_string(status));
  }
  return name.data();
}

const CudnnLibrary& LoadCudnn(const std::vector<std::string>& paths) {
  static std::mutex mutex;
  // Never unloaded: plans and handles point into the library until the process ends.
  static const CudnnLibrary* found = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (!found) found = Open(paths).release();
  return *found;
}

const CudnnLibrary& Cudnn() {
  static const CudnnLibrary& library = LoadCudnn({});
  return library;
}

Target TargetOf(int device) {
  int major = 0, minor = 0;
  CheckCuda(Cudart().get_attribute(&major, cudaDevAttrComputeCapabilityMajor, device),
            "cudaDeviceGetAttribute");
  CheckCuda(Cudart().get_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
            "cudaDeviceGetAttribute");
  return {static_cast<size_t>(10 * major + minor), Cudnn().version, CublasLtVersion()};
}

size_t CublasLtVersion() {
  static const size_t version = [] {
    void* library = OpenOneOf(kCublasLtNames);
    void* symbol = library ? dlsym(library, "cublasLtGetVersion") : nullptr;
    return symbol ? reinterpret_cast<size_t (*)()>(symbol)() : 0;
  }();
  return version;
}

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) {
    throw Error(ErrorCode::kInternal, std::string(what) +
                                          " failed: " + Cudnn().error_string(status) + " (cuDNN " +
                                          VersionText(Cudnn().version) + ")");
  }
}

void CopyOnDevice(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  CheckCuda(Cudart().memcpy_async(to, from, bytes, cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
}

OwnStream::OwnStream(int device) {
  const DeviceScope scope(device);
  CheckCuda(Cudart().stream_create(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

OwnStream::~OwnStream() { (void)Cudart().stream_destroy(stream_); }

DeviceScope::DeviceScope(int device) {
  if (device == kNoDevice) return;
  int current = -1;
  CheckCuda(Cudart().get_device(&current), "cudaGetDevice");
  if (current == device) return;
  CheckCuda(Cudart().set_device(device), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) (void)Cudart().set_device(previous_);
}

}  // namespace jaxcudnn
