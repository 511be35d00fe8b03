// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <vector>

namespace jaxcudnn {

/// What one candidate took, or why that is not known.
struct Timing {
  std::string name;
  double microseconds = std::numeric_limits<double>::quiet_NaN();  ///< of one run; NaN: not timed
  std::string reason;                                              ///< why not; else empty
  bool failed = false;  ///< it was tried, and cannot run or computes something else
};

struct TuningBudget {
  int64_t candidates;    ///< to be tried at most
  int64_t candidate_us;  ///< for the runs of one, its first apart
  int64_t total_us;      ///< after which no further one is begun
};

/// Which of the candidates can be timed with less than `limit` bytes, the arrays' among them.
[[nodiscard]] inline std::vector<size_t> Fitting(const std::vector<size_t>& workspaces,
                                                 size_t arrays, size_t limit) {
  std::vector<size_t> fitting;
  for (size_t i = 0; i < workspaces.size(); ++i) {
    if (arrays < limit && workspaces[i] < limit - arrays) fitting.push_back(i);
  }
  return fitting;
}

/// Memory, and the candidates that can be timed in it.
struct Room {
  std::vector<size_t> fitting;
  void* memory = nullptr;  ///< null if there is not even enough for the arrays
};

/// Asks `void* allocate(size_t bytes)` for memory for all candidates that need less than `limit`,
/// then for ever fewer, those that need the most left out first.
template <typename Allocate>
[[nodiscard]] Room MakeRoom(const std::vector<size_t>& workspaces, size_t arrays, size_t limit,
                            Allocate allocate) {
  Room room;
  while (!room.memory) {
    room.fitting = Fitting(workspaces, arrays, limit);
    if (room.fitting.empty()) break;
    size_t most = 0;
    for (size_t i : room.fitting) most = std::max(most, workspaces[i]);
    limit = arrays + most;
    room.memory = allocate(limit);
  }
  return room;
}

inline constexpr size_t kNone = static_cast<size_t>(-1);

/// The race between candidates, apart from cuDNN and the clock. `Track` has two members:
///   double Run(size_t index, int repetitions)   microseconds of one of so many runs in a row; or
///                                               throws std::exception if the candidate cannot run
///   double Elapsed()                            microseconds since the race began
///
/// Each candidate runs once, to load its kernels, unless that was long up to three times again, and
/// if it is not behind then, some more. One whose first run is behind by more than loading explains
/// is dropped at once. Then those close to the best run in turns, since clocks and neighbours
/// change meanwhile, and the least time counts: whatever disturbs a run only slows it. While all
/// have failed that were tried, the next is, whatever the budget: something has to compute the
/// convolution.
template <typename Track>
[[nodiscard]] size_t Race(Track& track, const TuningBudget& budget, std::vector<Timing>& timings) {
  constexpr double kBehind = 1.3, kClose = 1.1, kLoading_us = 10'000;
  constexpr double kLong_us = 10 * kLoading_us;  // of which loading is no large part
  constexpr double kHeats = 0.75;                // of the time; the rest is for the finals
  constexpr int kFewRuns = 3;                    // one alone can take half as long again
  constexpr int kMostRuns = 8, kFinalRounds = 2;
  constexpr size_t kFinalists = 4;
  double best = std::numeric_limits<double>::infinity();
  const auto in_time = [&](double share) {
    return track.Elapsed() < share * static_cast<double>(budget.total_us);
  };
  const auto runs_for = [&](double us) {
    const double affordable = static_cast<double>(budget.candidate_us) / std::max(us, 1.0);
    return static_cast<int>(std::clamp(affordable / 2, 1.0, static_cast<double>(kMostRuns)));
  };

  const auto fail = [](Timing& timing, const std::exception& error) {
    timing = {timing.name, std::numeric_limits<double>::quiet_NaN(), error.what(), true};
  };

  int64_t begun = 0;
  for (size_t i = 0; i < timings.size(); ++i) {
    Timing& timing = timings[i];
    const bool has_one = best < std::numeric_limits<double>::infinity();
    if (has_one && (begun >= budget.candidates || !in_time(kHeats))) {
      timing.reason = "the budget was spent";
      continue;
    }
    ++begun;
    try {
      const double first = track.Run(i, 1);
      timing.microseconds = first;
      if (first > kBehind * best && first - best > kLoading_us) continue;
      if (in_time(1) && first < kLong_us)
        timing.microseconds = track.Run(i, std::min(kFewRuns, runs_for(first)));
      const double again = timing.microseconds;
      if (again < kBehind * best && again <= static_cast<double>(budget.candidate_us)) {
        timing.microseconds = std::min(again, track.Run(i, runs_for(again)));
      }
      best = std::min(best, timing.microseconds);
    } catch (const std::exception& error) {
      fail(timing, error);
    }
  }

  std::vector<size_t> finalists;
  for (size_t i = 0; i < timings.size(); ++i) {
    if (timings[i].microseconds <= kClose * best) finalists.push_back(i);  // false for NaN
  }
  const auto faster = [&](size_t a, size_t b) {
    return timings[a].microseconds < timings[b].microseconds;
  };
  std::stable_sort(finalists.begin(), finalists.end(), faster);
  finalists.resize(std::min(finalists.size(), kFinalists));
  const auto has_failed = [&](size_t i) { return timings[i].failed; };
  for (int round = 0; finalists.size() > 1 && round < kFinalRounds; ++round) {
    for (size_t i : finalists) {
      if (!in_time(1)) break;
      double& us = timings[i].microseconds;
      try {
        us = std::min(us, track.Run(i, runs_for(us)));
      } catch (const std::exception& error) {
        fail(timings[i], error);
      }
    }
    finalists.erase(std::remove_if(finalists.begin(), finalists.end(), has_failed),
                    finalists.end());
  }
  if (finalists.empty()) return kNone;
  return *std::min_element(finalists.begin(), finalists.end(), faster);
}

}  // namespace jaxcudnn
