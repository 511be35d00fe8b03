// SPDX-License-Identifier: Apache-2.0
#include "fork_guard.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

#include "error.h"

namespace jaxcudnn {
namespace {

// Both are written around a fork alone.
std::atomic<bool> about_to_be_broken{false}, broken{false};

/// Whether cuInit was called, by whomever: JAX does so long before it gives us anything to do.
bool HasCudaStarted() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) return false;
  void* symbol = dlsym(driver, "cuDeviceGetCount");
  int count = 0;
  const bool started = symbol && reinterpret_cast<int (*)(int*)>(symbol)(&count) == 0;
  (void)dlclose(driver);
  return started;
}

void BeforeFork() { about_to_be_broken = HasCudaStarted(); }

void InChild() {
  if (about_to_be_broken) broken = true;
}

}  // namespace

void WatchForks() {
  static const int status = pthread_atfork(&BeforeFork, nullptr, &InChild);
  if (status) throw Error(ErrorCode::kInternal, "pthread_atfork failed");
}

void CheckNotForked() {
  if (!broken) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "this process was forked from one that had started CUDA, which does not work in a "
              "forked process; start it by multiprocessing.get_context('spawn') or 'forkserver', "
              "or fork before JAX has used a GPU");
}

}  // namespace jaxcudnn
