// SPDX-License-Identifier: Apache-2.0
//
// Depthwise wgrad, in two stages: sums over parts of the images, then the sum of those, both in an
// order that depends on nothing but the sizes. Macros beside those of depthwise.cuh:
//   ROWS, TAPS       taps of a thread
//   GROUPS_W         threads of a block side by side, beside the LANES, with the same taps
//   COLS             columns of dy that are unrolled together
//   REPEATS          times so many columns of each row are turned to
//   PAD              elements between the rows of dy in shared memory
//
// The threads of a block have all rows of taps, and TAPS of each row's. A row of x is multiplied
// with all rows of dy that it meets under the window; these wait in a ring in shared memory.
#include "depthwise.cuh"

namespace {

constexpr int kStrideH = AxisH::kStride, kStrideW = AxisW::kStride;
constexpr int kTapGroupsH = CeilDiv(WINDOW_H, ROWS), kTapGroupsW = CeilDiv(WINDOW_W, TAPS);
constexpr int kGroups = LANES * GROUPS_W;
constexpr int kThreads = kGroups * kTapGroupsH;
constexpr int kSteps = COLUMNS ? kGroups : GROUPS_W;  // threads along a row
constexpr int kTileW = kSteps * COLS * REPEATS;

constexpr int kInCols = (kTileW - 1) * kStrideW + TAPS;
constexpr int kInRing = 1 + PREFETCH;
constexpr int kOutRing = (WINDOW_H - 1 + PREFETCH) / kStrideH + 1;

using InLines = Transposed<kInCols, COLS * kStrideW>;
using OutLines = Transposed<kTileW, COLS>;
constexpr int kInRow = COLUMNS ? InLines::kElements : kInCols * kChannels;
constexpr int kOutRow = (COLUMNS ? OutLines::kElements : kTileW * kChannels) + PAD;
constexpr int kInBytes = (kInRing * kInRow * kBytes + 15) / 16 * 16;

// The threads whose sums belong together, and what each has of one row of taps.
constexpr int kShares = COLUMNS ? kGroups : GROUPS_W;
constexpr int kShareBytes = kThreads * TAPS * kWide * 4;

static_assert(PREFETCH > 0, "");
static_assert(SHARED_BYTES == Max(kInBytes + kOutRing * kOutRow * kBytes, kShareBytes), "");

DEVICE int InPosition(int col) { return COLUMNS ? InLines::Position(col) : col * kChannels; }
DEVICE int OutPosition(int col) { return COLUMNS ? OutLines::Position(col) : col * kChannels; }

using Sums = float[ROWS][TAPS][kWide];

/// Adds the products of COLS columns of dy, in all rows that are under the window, with a row of x.
DEVICE void AddColumns(Sums& sums, const Element* x_row, const Element* dy_ring,
                       const int (&dy_rows)[ROWS]) {
  constexpr int kSeen = (COLS - 1) * kStrideW + TAPS;
  float x[kSeen][kWide];
#pragma unroll
  for (int k = 0; k < kSeen; ++k)
    Load(x[k], x_row + (COLUMNS ? InLines::Offset(k) : k * kChannels));
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (dy_rows[r] < 0) continue;
    float dy[COLS][kWide];
#pragma unroll
    for (int o = 0; o < COLS; ++o) {
      Load(dy[o], dy_ring + dy_rows[r] + (COLUMNS ? OutLines::Offset(o) : o * kChannels));
    }
#pragma unroll
    for (int o = 0; o < COLS; ++o) {
#pragma unroll
      for (int s = 0; s < TAPS; ++s) {
#pragma unroll
        for (int v = 0; v < kWide; ++v) sums[r][s][v] += x[o * kStrideW + s][v] * dy[o][v];
      }
    }
  }
}

}  // namespace

/// Writes partial[chunk][tap][channel].
extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    DepthwiseAccumulate(const Element* __restrict__ x, const Element* __restrict__ dy,
                        float* __restrict__ partial, const Geometry g) {
  SHARED_MEMORY(memory);
  Element* const x_ring = reinterpret_cast<Element*>(memory);
  Element* const dy_ring = reinterpret_cast<Element*>(memory + kInBytes);

  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % LANES, group_w = thread / LANES % GROUPS_W, taps_h = thread / kGroups;
  int block = static_cast<int>(blockIdx.x);
  const int first_tap = block % kTapGroupsW * TAPS;
  block /= kTapGroupsW;
  const int channel = block % g.tiles_c * kChannels, chunk = block / g.tiles_c;
  const int channels = g.channels - channel;

  const int share = COLUMNS ? group_w * LANES + lane : group_w;
  const Element* const own_x =
      x_ring + (COLUMNS ? share : share * COLS * kStrideW * kChannels + lane * kWide);
  const Element* const own_dy =
      dy_ring + (COLUMNS ? share : share * COLS * kChannels + lane * kWide);
  constexpr int kNextX = COLUMNS ? kSteps : kSteps * COLS * kStrideW * kChannels;
  constexpr int kNextDy = COLUMNS ? kSteps : kSteps * COLS * kChannels;

  Sums sums = {};
  const int parts = g.images * g.tiles_h * g.tiles_w;
#pragma unroll 1
  for (int part = chunk; part < parts; part += g.chunks) {
    const int tile_w = part % g.tiles_w, tile_h = part / g.tiles_w % g.tiles_h;
    const int image = part / g.tiles_w / g.tiles_h;
    const int phase_h = tile_h % AxisH::kPhases, phase_w = tile_w % AxisW::kPhases;
    const int out_row = tile_h / AxisH::kPhases * g.rows,
              out_col = tile_w / AxisW::kPhases * kTileW;
    const int dy_rows = min(g.rows, AxisH::Count(g.out_h, phase_h) - out_row);
    if (dy_rows <= 0) continue;
    const int x_rows = (dy_rows - 1) * kStrideH + WINDOW_H;
    const int start_h = AxisH::At(phase_h, g.pad_h).start + out_row * kStrideH * AxisH::kIn;
    const int start_w =
        AxisW::At(phase_w, g.pad_w).start + (out_col * kStrideW + first_tap) * AxisW::kIn;
    const Element* const image_x = x + image * g.in_n + channel * g.in_c;
    const Element* const image_dy = dy + image * g.out_n + channel * g.out_c;
    const auto copy_rows = [&](int row) {
      const int at = start_h + row * AxisH::kIn;
      if (row < x_rows && IsInside(at, g.in_h)) {
        CopyRow<kInCols, kThreads>(x_ring + row % kInRing * kInRow, image_x + at * g.in_row,
                                   start_w, AxisW::kIn, g.in_w, g.in_col, channels, InPosition);
      }
      const int dy_row = row / kStrideH;
      if (row % kStrideH == 0 && dy_row < dy_rows) {
        const int dy_at = phase_h + (out_row + dy_row) * AxisH::kPhases;
        CopyRow<kTileW, kThreads>(dy_ring + dy_row % kOutRing * kOutRow,
                                  image_dy + dy_at * g.out_row, phase_w + out_col * AxisW::kPhases,
                                  AxisW::kPhases, g.out_w, g.out_col, channels, OutPosition);
      }
      CommitCopies();
    };

    __syncthreads();  // the rings are free
#pragma unroll
    for (int row = 0; row < PREFETCH; ++row) copy_rows(row);
#pragma unroll 1
    for (int i = 0; i < x_rows; ++i) {
      WaitForCopies<PREFETCH - 1>();
      __syncthreads();
      copy_rows(i + PREFETCH);
      if (!IsInside(start_h + i * AxisH::kIn, g.in_h)) continue;
      int met[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int tap = taps_h * ROWS + r, distance = i - tap, row = distance / kStrideH;
        const bool meets =
            tap < WINDOW_H && distance >= 0 && distance % kStrideH == 0 && row < dy_rows;
        met[r] = meets ? row % kOutRing * kOutRow : -1;
      }
      const Element* x_row = own_x + i % kInRing * kInRow;
      const Element* dy_cols = own_dy;
#pragma unroll 1
      for (int repeat = 0; repeat < REPEATS; ++repeat) {
        AddColumns(sums, x_row, dy_cols, met);
        x_row += kNextX;
        dy_cols += kNextDy;
      }
    }
  }
  WaitForCopies<0>();

  float* const shares = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < TAPS; ++s) {
#pragma unroll
      for (int v = 0; v < kWide; ++v) {
        shares[((taps_h * kShares + share) * TAPS + s) * kChannels + (COLUMNS ? 0 : lane * kWide) +
               v] = sums[r][s][v];
      }
    }
    __syncthreads();
    for (int i = thread; i < kTapGroupsH * TAPS * kChannels; i += kThreads) {
      const int c = i % kChannels, s = i / kChannels % TAPS, group = i / kChannels / TAPS;
      const int row = group * ROWS + r, col = first_tap + s;
      if (c >= channels || row >= WINDOW_H || col >= WINDOW_W) continue;
      float sum = 0;
      for (int k = 0; k < kShares; ++k) {
        sum += shares[((group * kShares + k) * TAPS + s) * kChannels + c];
      }
      const long long tap = (static_cast<long long>(chunk) * WINDOW_H + row) * WINDOW_W + col;
      partial[tap * g.channels + channel + c] = sum;
    }
  }
}

constexpr int kFinishLanes = 32, kFinishGroups = 8;

/// Sums the partial sums, in the order of their chunks. A warp has 32 neighbouring results.
extern "C" __global__ void __launch_bounds__(kFinishLanes* kFinishGroups)
    DepthwiseFinish(const float* __restrict__ partial, Element* __restrict__ dw, const Geometry g) {
  SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % kFinishLanes;
  const int group = static_cast<int>(threadIdx.x) / kFinishLanes;
  const long long results = static_cast<long long>(WINDOW_H) * WINDOW_W * g.channels;
  const long long result = static_cast<long long>(blockIdx.x) * kFinishLanes + lane;
  float sum = 0;
  if (result < results) {
#pragma unroll 8
    for (int chunk = group; chunk < g.chunks; chunk += kFinishGroups) {
      sum += partial[chunk * results + result];
    }
  }
  sums[group * kFinishLanes + lane] = sum;
  __syncthreads();
  if (group > 0 || result >= results) return;
#pragma unroll
  for (int other = 1; other < kFinishGroups; ++other) sum += sums[other * kFinishLanes + lane];
  const int channel = static_cast<int>(result % g.channels);
  const int tap = static_cast<int>(result / g.channels);
  const int row = FLIP ? WINDOW_H - 1 - tap / WINDOW_W : tap / WINDOW_W;
  const int col = FLIP ? WINDOW_W - 1 - tap % WINDOW_W : tap % WINDOW_W;
  dw[channel * g.filter_c + row * g.filter_row + col * g.filter_col] = ToElement(sum);
}
