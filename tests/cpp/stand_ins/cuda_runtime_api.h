// SPDX-License-Identifier: Apache-2.0
//
// What csrc/cudart.h takes from CUDA's header of this name, for tests that are compiled without
// CUDA.
#pragma once

#include <driver_types.h>

enum cudaError_t { cudaSuccess };

// Not called; cudart.h has a pointer to each.
void cudaGetDevice();
void cudaSetDevice();
void cudaDeviceGetAttribute();
void cudaMemcpyAsync();
void cudaMemsetAsync();
void cudaStreamIsCapturing();
void cudaStreamCreateWithFlags();
void cudaStreamDestroy();
void cudaStreamSynchronize();
void cudaEventCreateWithFlags();
void cudaEventDestroy();
void cudaEventRecord();
void cudaEventSynchronize();
void cudaEventElapsedTime();
void cudaLaunchHostFunc();
