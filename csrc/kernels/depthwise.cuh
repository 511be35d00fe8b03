// SPDX-License-Identifier: Apache-2.0
//
// What the depthwise kernels share. They are compiled at run time for one window, with these
// macros:
//   DTYPE                       0 float32, 1 float16, 2 bfloat16
//   OPERATION                   0 fprop, 1 dgrad, 2 wgrad
//   WINDOW_H ... DILATION_W     of the forward convolution; FLIP: its window is reversed
//   COLUMNS                     0: the threads of a warp compute neighbouring channels, of arrays
//                               with channels last; 1: neighbouring columns of one channel, of
//                               arrays with any strides
//   LANES                       threads side by side in that direction
//   VECTOR                      elements that one copy from global memory moves, a power of two;
//                               it divides the channels, and the arrays are aligned to it
//   PREFETCH                    rows on their way to shared memory while others are used
//   SHARED_BYTES, MIN_BLOCKS    of a block; resident on a multiprocessor
// and those that each kernel adds.
//
// Dilation and the strides of gradients are no concern of the inner loops: along each dimension the
// outputs fall into phases, each of which is a convolution without dilation of every so-many-th
// input (`Axis`).
#pragma once

namespace {

#define DEVICE __device__ __forceinline__

constexpr int kFprop = 0, kDgrad = 1, kWgrad = 2;

#if DTYPE == 0
using Element = float;
#else
using Element = unsigned short;  // its bits
#endif
constexpr int kBytes = sizeof(Element);

/// Channels of a thread: a pair, unless its neighbours have other columns of the same channel.
constexpr int kWide = COLUMNS ? 1 : 2;
/// Channels of a block.
constexpr int kChannels = COLUMNS ? 1 : LANES * kWide;

constexpr int Gcd(int a, int b) { return b == 0 ? a : Gcd(b, a % b); }
constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }
constexpr int Max(int a, int b) { return a > b ? a : b; }

/// What the kernels are told at run time. Strides are in elements.
struct Geometry {
  int images, channels;
  int in_h, in_w;    // of x; for dgrad, of dy
  int out_h, out_w;  // of y or dy; for dgrad, of dx
  int pad_h, pad_w;  // low, of the forward convolution
  int tiles_h, tiles_w, tiles_c;
  int chunks;  // wgrad: partial sums of each result
  int rows;    // wgrad: of dy, that are summed before others are turned to
  long long in_n, in_row, in_col, in_c;
  long long out_n, out_row, out_col, out_c;
  long long filter_c, filter_row, filter_col;
};

/// One dimension of a convolution. The outputs of phase p < kPhases are p, p + kPhases, ...; output
/// number j of them sums, over t < taps, the input at start + (j kStride + t) kIn times the
/// filter's tap first + t step.
template <int window, int stride, int dilation>
struct Axis {
  static constexpr int kGcd = Gcd(stride, dilation);
  static constexpr bool kIsDgrad = OPERATION == kDgrad;
  static constexpr int kSkip = kIsDgrad ? stride / kGcd : 1;  // taps of a phase are so far apart
  static constexpr int kPhases = kIsDgrad ? stride * (dilation / kGcd) : dilation / kGcd;
  static constexpr int kIn = kIsDgrad ? dilation / kGcd : dilation;
  static constexpr int kStride = kIsDgrad ? 1 : stride / kGcd;
  static constexpr int kTaps = CeilDiv(window, kSkip);
  /// A phase may have a tap less than kTaps, or none at all.
  static constexpr bool kIsRagged = kSkip > 1;

  struct Phase {
    int start, taps, first, step;
  };

  DEVICE static Phase At(int phase, int pad) {
    int first = 0, taps = window, step = kSkip, start = phase * stride - pad;
    if (kIsDgrad) {
      // dx[i] sums w[r] dy[o] where i + pad = o stride + r dilation, so r in steps of kSkip.
      while (first < kSkip && (phase + pad - first * dilation) % stride != 0) ++first;
      taps = first < kSkip && first < window ? (window - 1 - first) / kSkip + 1 : 0;
      // Taps are turned round, so that positions in dy ascend.
      start = (phase + pad - first * dilation) / stride - (taps - 1) * kIn;
      first += (taps - 1) * kSkip;
      step = -kSkip;
    }
    if (FLIP) {
      first = window - 1 - first;
      step = -step;
    }
    return {start, taps, first, step};
  }

  /// How many outputs of `size` are in a phase.
  DEVICE static int Count(int size, int phase) { return CeilDiv(size - phase, kPhases); }
};

using AxisH = Axis<WINDOW_H, STRIDE_H, DILATION_H>;
using AxisW = Axis<WINDOW_W, STRIDE_W, DILATION_W>;

/// Where a column of a row lies in shared memory, in elements, when each of the threads side by
/// side starts `period` columns after the one before: the same column of all of them side by side,
/// so that no two are in one bank. `Offset` is of a column counted from a thread's own first.
template <int columns, int period>
struct Transposed {
  static constexpr int kPitch = CeilDiv(columns, period) | 1;
  static constexpr int kElements = period * kPitch;
  DEVICE static int Position(int column) { return column % period * kPitch + column / period; }
  DEVICE static constexpr int Offset(int column) {
    return column % period * kPitch + column / period;
  }
};

#ifndef EMULATED
DEVICE unsigned SharedAddress(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/// Begins a copy to shared memory, or fills with zeros.
template <int bytes>
DEVICE void CopyAsync(void* to, const void* from, bool valid) {
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, "");
  if constexpr (bytes == 2) {
    *static_cast<Element*>(to) = valid ? __ldg(static_cast<const Element*>(from)) : Element(0);
  } else if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)),
                 "l"(from), "r"(valid ? bytes : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(SharedAddress(to)),
                 "l"(from), "n"(bytes), "r"(valid ? bytes : 0)
                 : "memory");
  }
}

/// Ends a group of copies.
DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for all groups of this thread but the newest so many.
template <int newest>
DEVICE void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory");
}

// As assembly, since the compiler else converts once more in each branch that uses the numbers.
#if DTYPE == 1
DEVICE void FromPair(unsigned pair, float& low, float& high) {
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}
DEVICE unsigned ToPair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#elif DTYPE == 2
DEVICE void FromPair(unsigned pair, float& low, float& high) {
  asm("shl.b32 %0, %1, 16;" : "=f"(low) : "r"(pair));
  asm("and.b32 %0, %1, 0xffff0000;" : "=f"(high) : "r"(pair));
}
DEVICE unsigned ToPair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#endif  // EMULATED

#if DTYPE == 0
DEVICE float ToFloat(float value) { return value; }
DEVICE float ToElement(float value) { return value; }
#else
DEVICE float ToFloat(Element bits) {
  float low, high;
  FromPair(bits, low, high);
  return low;
}
DEVICE Element ToElement(float value) { return static_cast<Element>(ToPair(value, value)); }
#endif

/// The channels of a thread, at an address of shared memory.
DEVICE void Load(float (&values)[kWide], const Element* from) {
#if COLUMNS
  values[0] = ToFloat(*from);
#elif DTYPE == 0
  const float2 pair = *reinterpret_cast<const float2*>(from);
  values[0] = pair.x;
  values[1] = pair.y;
#else
  FromPair(*reinterpret_cast<const unsigned*>(from), values[0], values[1]);
#endif
}

/// Writes the first `count` channels of a thread to global memory.
DEVICE void Store(Element* to, const float (&values)[kWide], int count) {
#if COLUMNS
  if (count > 0) *to = ToElement(values[0]);
#else
  if (VECTOR > 1) {
    if (count <= 0) return;
#if DTYPE == 0
    *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
#else
    *reinterpret_cast<unsigned*>(to) = ToPair(values[0], values[1]);
#endif
  } else {
    if (count > 0) to[0] = ToElement(values[0]);
    if (count > 1) to[1] = ToElement(values[1]);
  }
#endif
}

/// Begins to copy `columns` columns of a row, `step` apart from `start` on, to shared memory; those
/// outside of the image are zeros. `row` points at the first column and the block's first channel,
/// of which `channels` exist.
template <int columns, int threads, typename Position>
DEVICE void CopyRow(Element* to, const Element* row, int start, int step, int width,
                    long long stride, int channels, Position position) {
  constexpr int kVector = COLUMNS ? 1 : VECTOR;
  constexpr int kCopies = kChannels / kVector;  // of one column
  static_assert(kChannels % kVector == 0, "");
#pragma unroll
  for (int first = 0; first < columns * kCopies; first += threads) {
    const int index = first + static_cast<int>(threadIdx.x);
    if (columns * kCopies % threads != 0 && index >= columns * kCopies) break;
    const int column = index / kCopies, channel = index % kCopies * kVector;
    const int at = start + column * step;
    const bool valid = at >= 0 && at < width && channel < channels;
    CopyAsync<kVector * kBytes>(to + position(column) + channel,
                                valid ? row + at * stride + channel : row, valid);
  }
}

/// Whether a position is in an image of `size`.
DEVICE bool IsInside(int position, int size) {
  return static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

}  // namespace
