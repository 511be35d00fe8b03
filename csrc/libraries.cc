// SPDX-License-Identifier: Apache-2.0
#include "libraries.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <mutex>

#include "error.h"
#include "version_text.h"

namespace jaxcudnn {
namespace {

constexpr const char* kCudnnName = "libcudnn.so.9";
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

struct CudaRuntime {
  decltype(&::cudaGetDevice) get_device;
  decltype(&::cudaSetDevice) set_device;
  decltype(&::cudaDeviceGetAttribute) get_attribute;
  decltype(&::cudaMemcpyAsync) memcpy_async;
};

const CudaRuntime& Cudart() {
  static const CudaRuntime runtime = [] {
    void* library = OpenOneOf(kCudartNames);
    if (!library) {
      throw Error(ErrorCode::kFailedPrecondition,
                  "the CUDA runtime (libcudart.so.13 or .12) was not found: " + LastLinkerError());
    }
    const std::string owner = "the CUDA runtime at " + PathOf(library);
    return CudaRuntime{
        Symbol<decltype(&::cudaGetDevice)>(library, "cudaGetDevice", owner),
        Symbol<decltype(&::cudaSetDevice)>(library, "cudaSetDevice", owner),
        Symbol<decltype(&::cudaDeviceGetAttribute)>(library, "cudaDeviceGetAttribute", owner),
        Symbol<decltype(&::cudaMemcpyAsync)>(library, "cudaMemcpyAsync", owner),
    };
  }();
  return runtime;
}

void CheckCuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kInternal,
                std::string(what) + " failed with CUDA error " + std::to_string(status));
  }
}

}  // namespace

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

DeviceScope::DeviceScope(int device) {
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
