// SPDX-License-Identifier: Apache-2.0
//
// Runs the kernels on the CPU. Each thread of a block is a fibre, and all of them take turns on one
// thread of the host, from barrier to barrier. Shared memory starts as NaN.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
  unsigned x;
};
static Dim threadIdx, blockIdx;
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static int min(int a, int b) { return a < b ? a : b; }

namespace emulation {

constexpr int kMaxThreads = 1024, kMaxCopies = 4096, kStackBytes = 64 << 10;

struct Copy {
  void* to;
  unsigned char bytes[16];
  int size, group;
};

struct Fibre {
  ucontext_t context;
  char stack[kStackBytes];
  Copy copies[kMaxCopies];  // that nobody has waited for
  int count, groups;        // groups that were ended
  bool done;
};

static Fibre* fibres;
static ucontext_t scheduler;
static int current;
static bool deferred;  // copies happen when they are waited for, not at once
static void (*body)();
alignas(256) static unsigned char shared[256 << 10];
static size_t shared_bytes;

static void Require(bool condition) {
  if (!condition) abort();
}

static void Perform(const Copy& copy) {
  auto* to = static_cast<unsigned char*>(copy.to);
  Require(to >= shared && to + copy.size <= shared + shared_bytes);
  Require(reinterpret_cast<uintptr_t>(to) % copy.size == 0);
  memcpy(to, copy.bytes, copy.size);
}

static void Enter() {
  body();
  fibres[current].done = true;
  swapcontext(&fibres[current].context, &scheduler);
}

static void Start(Fibre& fibre) {
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack;
  fibre.context.uc_stack.ss_size = kStackBytes;
  fibre.context.uc_link = &scheduler;
  fibre.count = fibre.groups = 0;
  fibre.done = false;
  makecontext(&fibre.context, &Enter, 0);
}

/// Runs all blocks; `backwards`: the last block and the last thread come first.
static void Run(int blocks, int threads, size_t bytes, bool defer, bool backwards,
                void (*kernel)()) {
  Require(threads <= kMaxThreads && bytes <= sizeof(shared));
  deferred = defer;
  body = kernel;
  shared_bytes = bytes;
  fibres = static_cast<Fibre*>(calloc(threads, sizeof(Fibre)));
  Require(fibres != nullptr);
  for (int b = 0; b < blocks; ++b) {
    blockIdx.x = backwards ? blocks - 1 - b : b;
    memset(shared, 0xff, sizeof(shared));
    for (int t = 0; t < threads; ++t) Start(fibres[t]);
    for (int done = 0; done < threads;) {
      for (int t = 0; t < threads; ++t) {
        current = backwards ? threads - 1 - t : t;
        if (fibres[current].done) continue;
        threadIdx.x = current;
        swapcontext(&scheduler, &fibres[current].context);
        done += fibres[current].done;
      }
    }
  }
  free(fibres);
}

}  // namespace emulation

static void __syncthreads() {
  using namespace emulation;
  swapcontext(&fibres[current].context, &scheduler);
}

#define SHARED_MEMORY(name) unsigned char* const name = emulation::shared

template <int bytes>
static void CopyAsync(void* to, const void* from, bool valid) {
  using namespace emulation;
  Require(reinterpret_cast<uintptr_t>(from) % bytes == 0);
  Fibre& fibre = fibres[current];
  Copy copy{to, {}, bytes, fibre.groups};
  if (valid) memcpy(copy.bytes, from, bytes);
  if (deferred && bytes > 2) {  // those of two bytes are ordinary stores
    Require(fibre.count < kMaxCopies);
    fibre.copies[fibre.count++] = copy;
  } else {
    Perform(copy);
  }
}

static void CommitCopies() { ++emulation::fibres[emulation::current].groups; }

template <int newest>
static void WaitForCopies() {
  using namespace emulation;
  Fibre& fibre = fibres[current];
  int left = 0;
  for (int i = 0; i < fibre.count; ++i) {
    if (fibre.copies[i].group < fibre.groups - newest) {
      Perform(fibre.copies[i]);
    } else {
      fibre.copies[left++] = fibre.copies[i];
    }
  }
  fibre.count = left;
}

#if DTYPE == 1
static float Widen(unsigned short bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
static unsigned Narrow(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}
#elif DTYPE == 2
static float Widen(unsigned short bits) {
  const unsigned wide = static_cast<unsigned>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static unsigned Narrow(float value) {
  if (value != value) return 0x7fff;
  unsigned bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
#if DTYPE != 0
static void FromPair(unsigned pair, float& low, float& high) {
  low = Widen(pair & 0xffff);
  high = Widen(pair >> 16);
}
static unsigned ToPair(float low, float high) { return Narrow(low) | Narrow(high) << 16; }
#endif

#include KERNEL

static const void *first, *second;
static void* result;
static const Geometry* geometry;

/// Runs a kernel; `stage`: 0, or of filter gradients 1.
extern "C" void Launch(int stage, int blocks, int threads, int64_t bytes, int defer, int backwards,
                       const void* a, const void* b, void* c, const Geometry* g) {
  first = a, second = b, result = c, geometry = g;
  void (*kernel)();
#if OPERATION == 2
  if (stage == 1) {
    kernel = [] {
      DepthwiseFinish(static_cast<const float*>(first), static_cast<Element*>(result), *geometry);
    };
  } else {
    kernel = [] {
      DepthwiseAccumulate(static_cast<const Element*>(first), static_cast<const Element*>(second),
                          static_cast<float*>(result), *geometry);
    };
  }
#else
  emulation::Require(stage == 0);
  kernel = [] {
    DepthwiseCorrelate(static_cast<const Element*>(first), static_cast<const Element*>(second),
                       static_cast<Element*>(result), *geometry);
  };
#endif
  emulation::Run(blocks, threads, bytes, defer, backwards, kernel);
}
