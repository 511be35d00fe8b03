// SPDX-License-Identifier: Apache-2.0
//
// The pool of handles over a cuDNN that only counts and remembers.
#include "handle_pool.h"

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "check.h"
#include "error.h"
#include "libraries.h"
#include "threads.h"

namespace jaxcudnn {
namespace {

using testing::InThreads;
using testing::Throws;

thread_local int current_device = -1;
std::atomic<int> created{0};
std::atomic<bool> failing{false};
std::array<char, 16> handles;            // each handle is the address of one
std::map<cudnnHandle_t, int> device_of;  // on which it was created
std::map<cudnnHandle_t, cudaStream_t> stream_of;

cudnnStatus_t Create(cudnnHandle_t* handle) {
  if (failing) return CUDNN_STATUS_ALLOC_FAILED;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that others come meanwhile
  *handle = reinterpret_cast<cudnnHandle_t>(&handles.at(static_cast<size_t>(created++)));
  device_of[*handle] = current_device;
  stream_of[*handle] = nullptr;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t SetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (failing) return CUDNN_STATUS_ALLOC_FAILED;
  stream_of.at(handle) = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudaStream_t Stream(int number) {
  static std::array<char, 64> streams;
  return reinterpret_cast<cudaStream_t>(&streams.at(static_cast<size_t>(number)));
}

}  // namespace

// In place of libraries.cc, whose functions need cuDNN and CUDA.

const CudnnLibrary& Cudnn() {
  static const CudnnLibrary library = [] {
    CudnnLibrary counting{};
    counting.create = &Create;
    counting.set_stream = &SetStream;
    return counting;
  }();
  return library;
}

void CheckCudnn(cudnnStatus_t status, const char* what) {
  if (status != CUDNN_STATUS_SUCCESS) throw Error(ErrorCode::kInternal, what);
}

DeviceScope::DeviceScope(int device) : previous_(current_device) { current_device = device; }
DeviceScope::~DeviceScope() { current_device = previous_; }

namespace {

void EachDeviceHasOneHandle() {
  DeviceHandle& first = HandleOf(0);
  DeviceHandle& second = HandleOf(kMaxDevices - 1);
  CHECK(&first == &HandleOf(0));
  CHECK(&second == &HandleOf(kMaxDevices - 1));
  CHECK(&first != &second);
  CHECK(created == 2);
  CHECK(current_device == -1);  // as before
}

void ALeaseGivesTheDevicesHandleBoundToTheStream() {
  const HandleLease first(HandleOf(0), Stream(1));
  const HandleLease second(HandleOf(kMaxDevices - 1), Stream(2));  // waits for no other device
  CHECK(device_of.at(first.get()) == 0);
  CHECK(device_of.at(second.get()) == kMaxDevices - 1);
  CHECK(stream_of.at(first.get()) == Stream(1));
  CHECK(stream_of.at(second.get()) == Stream(2));
}

void ThreadsShareTheHandleOneAtATime() {
  const int before = created;
  std::atomic<int> inside{0}, wrong{0};
  InThreads(8, [&](int i) {
    for (int step = 0; step < 500; ++step) {
      const HandleLease lease(HandleOf(2), Stream(i));
      wrong += ++inside != 1;
      std::this_thread::yield();
      wrong += stream_of.at(lease.get()) != Stream(i);
      --inside;
    }
  });
  CHECK(wrong == 0);
  CHECK(created == before + 1);
}

void DevicesOutOfRangeAreRefused() {
  for (int device : {-1, kMaxDevices}) {
    CHECK(Throws(ErrorCode::kInvalidArgument,
                 "device must be in [0, 64), got " + std::to_string(device),
                 [&] { HandleOf(device); }));
  }
}

void FailuresAreReportedAndNotKept() {
  failing = true;
  CHECK(Throws(ErrorCode::kInternal, "cudnnCreate", [] { HandleOf(3); }));
  DeviceHandle& working = HandleOf(0);
  CHECK(Throws(ErrorCode::kInternal, "cudnnSetStream", [&] { HandleLease(working, Stream(3)); }));
  failing = false;
  const HandleLease lease(working, Stream(4));  // so the failed lease has let go of the handle
  CHECK(stream_of.at(lease.get()) == Stream(4));
  CHECK(device_of.at(HandleLease(HandleOf(3), Stream(5)).get()) == 3);
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  EachDeviceHasOneHandle();
  ALeaseGivesTheDevicesHandleBoundToTheStream();
  ThreadsShareTheHandleOneAtATime();
  DevicesOutOfRangeAreRefused();
  FailuresAreReportedAndNotKept();
  return testing::failures != 0;
}
