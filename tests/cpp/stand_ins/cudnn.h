// SPDX-License-Identifier: Apache-2.0
//
// What csrc/handle_pool.cc and the headers that it includes take from cuDNN's header of this name,
// for tests that are compiled without cuDNN.
#pragma once

#include <driver_types.h>

using cudnnHandle_t = struct cudnnContext*;
enum cudnnStatus_t { CUDNN_STATUS_SUCCESS, CUDNN_STATUS_ALLOC_FAILED };

cudnnStatus_t cudnnCreate(cudnnHandle_t*);
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t);
const char* cudnnGetErrorString(cudnnStatus_t);
// Not called; libraries.h has a pointer to each.
void cudnnBackendCreateDescriptor();
void cudnnBackendDestroyDescriptor();
void cudnnBackendSetAttribute();
void cudnnBackendFinalize();
void cudnnBackendExecute();
