// SPDX-License-Identifier: Apache-2.0
//
// What csrc/ takes from CUDA's header of this name, for tests that are compiled without CUDA.
#pragma once

using cudaStream_t = struct CUstream_st*;
