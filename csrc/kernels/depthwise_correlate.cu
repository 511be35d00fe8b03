// SPDX-License-Identifier: Apache-2.0
//
// Depthwise fprop and dgrad. Macros beside those of depthwise.cuh:
//   ROWS, COLS       outputs of a thread
//   GROUPS_H         threads of a block one below the other
//   GROUPS_W         side by side, beside the LANES
//   CHUNK            taps of a row that are unrolled together
//   ROLLING          rows of the filter come to shared memory one by one
//
// A block computes a tile of one image. It takes the input row by row: row number i of a thread's
// own adds tap i - j kStride to its output row j. Rows wait in a ring in shared memory.
#include "depthwise.cuh"

namespace {

constexpr int kGroups = LANES * GROUPS_W;
constexpr int kThreads = kGroups * GROUPS_H;
constexpr int kStrideH = AxisH::kStride, kStrideW = AxisW::kStride;
constexpr int kTapsH = AxisH::kTaps, kTapsW = AxisW::kTaps;
constexpr int kTileH = GROUPS_H * ROWS;
constexpr int kTileW = (COLUMNS ? kGroups : GROUPS_W) * COLS;

constexpr int kReach =
    (GROUPS_H - 1) * ROWS * kStrideH;  // from the first group's row to the last's
constexpr int kInRows = (kTileH - 1) * kStrideH + kTapsH;
constexpr int kInCols = (kTileW - 1) * kStrideW + kTapsW;
constexpr int kRing = PREFETCH > 0 ? kReach + 1 + PREFETCH : kInRows;

using Lines = Transposed<kInCols, COLS * kStrideW>;
constexpr int kRowElements = COLUMNS ? Lines::kElements : kInCols * kChannels;

// Weights as float32; those of neighbouring channels side by side, a little apart from tap to tap
// lest the stores, whose neighbours are taps, meet in one bank.
constexpr int kWeightPitch = COLUMNS ? 1 : kChannels + 2;
constexpr int kWeightRow = (kTapsW * kWeightPitch + 3) / 4 * 4;
constexpr int kWeightRows = ROLLING ? (ROWS - 1) * kStrideH + 2 : kTapsH;
constexpr int kWeightBytes = (kWeightRows * kWeightRow * 4 + 15) / 16 * 16;
constexpr int kStaged = CeilDiv(kTapsW * kChannels, kThreads);

constexpr int kOutPitch = kTileW / COLS + 1;  // of a row on its way out, if COLUMNS
constexpr int kOutBytes = COLUMNS ? GROUPS_H * COLS * kOutPitch * 4 : 0;

static_assert(SHARED_BYTES == Max(kWeightBytes + kRing * kRowElements * kBytes, kOutBytes), "");
static_assert(!ROLLING || PREFETCH > 0, "weights come at the barriers of rows");
static_assert(!COLUMNS || CHUNK % (COLS * kStrideW) == 0, "chunks start at a thread's column");
static_assert(!COLUMNS || CHUNK % 4 == 0, "chunks start at a vector of weights");

DEVICE int Position(int column) { return COLUMNS ? Lines::Position(column) : column * kChannels; }
DEVICE constexpr int Offset(int column) {
  return COLUMNS ? Lines::Offset(column) : column * kChannels;
}
constexpr int kChunkElements = COLUMNS ? CHUNK / (COLS * kStrideW) : CHUNK * kChannels;

/// One row of the filter on its way to shared memory.
struct StagedWeights {
  float values[kStaged];

  template <typename Use>
  DEVICE static void ForEach(const Use& use) {
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      // Neighbours are taps of one channel, which lie side by side in most filters.
      if (index < kTapsW * kChannels) use(i, index / kTapsW, index % kTapsW);
    }
  }

  DEVICE void Fetch(const Element* filter, const Geometry& g, const AxisW::Phase& w, int channels) {
    ForEach([&](int i, int channel, int tap) {
      const bool valid = channel < channels && tap < w.taps;
      const long long at = channel * g.filter_c + (w.first + tap * w.step) * g.filter_col;
      values[i] = valid ? ToFloat(filter[at]) : 0.0f;
    });
  }

  DEVICE void Put(float* row) const {
    ForEach([&](int i, int channel, int tap) { row[tap * kWeightPitch + channel] = values[i]; });
  }
};

using Sums = float[ROWS][COLS][kWide];

/// Adds `count` taps of a row of inputs to all output rows that it belongs to.
template <int count>
DEVICE void AddTaps(Sums& sums, const Element* row, const float* weights, const int (&rows)[ROWS],
                    int tap, int taps) {
  constexpr int kSeen = (COLS - 1) * kStrideW + count;
  float x[kSeen][kWide];
#pragma unroll
  for (int k = 0; k < kSeen; ++k) Load(x[k], row + Offset(k));
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    if (rows[j] < 0) continue;  // for all threads alike
    const float* const from = weights + rows[j] + tap * kWeightPitch;
    float w[(count + 3) / 4 * 4][kWide];
#pragma unroll
    for (int s = 0; s < count; ++s) {
#if COLUMNS
      if (s % 4 == 0) {
        const float4 four = *reinterpret_cast<const float4*>(from + s);
        w[s][0] = four.x;
        w[s + 1][0] = four.y;
        w[s + 2][0] = four.z;
        w[s + 3][0] = four.w;
      }
#else
      const float2 two = *reinterpret_cast<const float2*>(from + s * kWeightPitch);
      w[s][0] = two.x;
      w[s][1] = two.y;
#endif
      // Never a product with a zero in the place of a tap: the input may be infinite.
      if (AxisW::kIsRagged && s == count - 1 && tap + s >= taps) continue;
#pragma unroll
      for (int o = 0; o < COLS; ++o) {
#pragma unroll
        for (int v = 0; v < kWide; ++v) sums[j][o][v] += x[o * kStrideW + s][v] * w[s][v];
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    DepthwiseCorrelate(const Element* __restrict__ in, const Element* __restrict__ filter,
                       Element* __restrict__ out, const Geometry g) {
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory);
  Element* const ring = reinterpret_cast<Element*>(memory + kWeightBytes);

  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % LANES, group_w = thread / LANES % GROUPS_W, group_h = thread / kGroups;
  int block = static_cast<int>(blockIdx.x);
  const int channel = block % g.tiles_c * kChannels;
  block /= g.tiles_c;
  const int tile_w = block % g.tiles_w;
  block /= g.tiles_w;
  const int tile_h = block % g.tiles_h, image = block / g.tiles_h;
  const int phase_h = tile_h % AxisH::kPhases, phase_w = tile_w % AxisW::kPhases;
  const int out_row = tile_h / AxisH::kPhases * kTileH, out_col = tile_w / AxisW::kPhases * kTileW;
  const AxisH::Phase h = AxisH::At(phase_h, g.pad_h);
  const AxisW::Phase w = AxisW::At(phase_w, g.pad_w);
  const int channels = g.channels - channel;  // from this block's first on

  const int start_h = h.start + out_row * kStrideH * AxisH::kIn;
  const int start_w = w.start + out_col * kStrideW * AxisW::kIn;
  const Element* const image_in = in + image * g.in_n + channel * g.in_c;
  const int rows = (kTileH - 1) * kStrideH + h.taps;
  const auto copy_row = [&](int row) {
    const int at = start_h + row * AxisH::kIn;
    if (row >= rows || !IsInside(at, g.in_h)) return;  // for all threads alike
    CopyRow<kInCols, kThreads>(ring + row % kRing * kRowElements, image_in + at * g.in_row, start_w,
                               AxisW::kIn, g.in_w, g.in_col, channels, Position);
  };
  const Element* const taps = filter + channel * g.filter_c;
  const auto filter_row = [&](int tap) { return taps + (h.first + tap * h.step) * g.filter_row; };

  for (int row = 0; row < (PREFETCH > 0 ? kReach + 1 : kInRows); ++row) copy_row(row);
  CommitCopies();
#pragma unroll
  for (int row = kReach + 1; row < kReach + PREFETCH; ++row) {
    copy_row(row);
    CommitCopies();
  }
  StagedWeights staged;
#pragma unroll 8  // so that the fetches do not wait for each other
  for (int tap = 0; tap < (ROLLING ? 1 : kTapsH); ++tap) {
    staged.Fetch(filter_row(tap), g, w, tap < h.taps ? channels : 0);
    staged.Put(weights + tap * kWeightRow);
  }

  Sums sums = {};
  const int own_row = group_h * ROWS * kStrideH;
  const Element* const own =
      ring +
      (COLUMNS ? group_w * LANES + lane : group_w * COLS * kStrideW * kChannels + lane * kWide);
  const float* const own_weights = weights + (COLUMNS ? 0 : lane * kWide);
  const int steps = w.taps > 0 && h.taps > 0 ? (ROWS - 1) * kStrideH + h.taps : 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    if (PREFETCH > 0 || i == 0) {
      WaitForCopies<(PREFETCH > 0 ? PREFETCH - 1 : 0)>();
      __syncthreads();
    }
    if (PREFETCH > 0) {
      copy_row(i + kReach + PREFETCH);
      CommitCopies();
    }
    const bool brings_weights = ROLLING && i + 1 < h.taps;
    if (brings_weights) staged.Fetch(filter_row(i + 1), g, w, channels);

    if (IsInside(start_h + (own_row + i) * AxisH::kIn, g.in_h)) {
      const Element* row = own + (own_row + i) % kRing * kRowElements;
      int weight_rows[ROWS];
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        const int tap = i - j * kStrideH;
        weight_rows[j] =
            IsInside(tap, h.taps) ? (ROLLING ? tap % kWeightRows : tap) * kWeightRow : -1;
      }
      constexpr int kWhole = kTapsW / CHUNK, kRest = kTapsW % CHUNK;
#pragma unroll 1
      for (int chunk = 0; chunk < kWhole; ++chunk) {
        AddTaps<CHUNK>(sums, row, own_weights, weight_rows, chunk * CHUNK, w.taps);
        row += kChunkElements;
      }
      if constexpr (kRest > 0) {
        AddTaps<kRest>(sums, row, own_weights, weight_rows, kWhole * CHUNK, w.taps);
      }
    }
    if (brings_weights) staged.Put(weights + (i + 1) % kWeightRows * kWeightRow);
  }

  Element* const image_out =
      out + image * g.out_n + (channel + (COLUMNS ? 0 : lane * kWide)) * g.out_c;
  const int count_w = AxisW::Count(g.out_w, phase_w) - out_col;
  const auto row_of = [&](int row) { return phase_h + (out_row + row) * AxisH::kPhases; };
  const auto col_of = [&](int col) { return phase_w + (out_col + col) * AxisW::kPhases; };
#if COLUMNS
  // Through shared memory, so that neighbours write neighbouring columns.
  WaitForCopies<0>();
  float* const line = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    __syncthreads();
#pragma unroll
    for (int o = 0; o < COLS; ++o) {
      line[(group_h * COLS + o) * kOutPitch + group_w * LANES + lane] = sums[j][o][0];
    }
    __syncthreads();
    const int at = row_of(group_h * ROWS + j);
    if (at >= g.out_h) continue;
#pragma unroll
    for (int o = 0; o < COLS; ++o) {
      const int col = o * kGroups + thread % kGroups;
      const float value[1] = {line[(group_h * COLS + col % COLS) * kOutPitch + col / COLS]};
      if (col < count_w) Store(image_out + at * g.out_row + col_of(col) * g.out_col, value, 1);
    }
  }
#else
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int at = row_of(group_h * ROWS + j);
    if (at >= g.out_h) break;
#pragma unroll
    for (int o = 0; o < COLS; ++o) {
      const int col = group_w * COLS + o;
      if (col >= count_w) break;
      Store(image_out + at * g.out_row + col_of(col) * g.out_col, sums[j][o],
            channels - lane * kWide);
    }
  }
#endif
}
