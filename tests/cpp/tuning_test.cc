// SPDX-License-Identifier: Apache-2.0
#include "tuning.h"

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace jaxcudnn {
namespace {

constexpr TuningBudget kAmple{1000, 5000, 1'000'000'000};

/// Candidates with known times, and a clock that they move.
struct Track {
  std::vector<double> us;          // of an ordinary run
  std::vector<double> loading_us;  // added to the first run
  std::vector<std::string> failures = {};
  double clock = 0;
  std::vector<std::vector<int>> runs = {};
  std::function<double(size_t, int)> noise = [](size_t, int) { return 1.0; };

  double Run(size_t index, int repetitions) {
    runs.resize(us.size());
    const bool first = runs[index].empty();
    runs[index].push_back(repetitions);
    if (index < failures.size() && !failures[index].empty()) {
      throw std::runtime_error(failures[index]);
    }
    double took = us[index] * noise(index, static_cast<int>(runs[index].size()));
    if (first && index < loading_us.size()) took += loading_us[index];
    clock += took * repetitions;
    return took;
  }
  [[nodiscard]] double Elapsed() const { return clock; }
};

size_t RaceOf(Track& track, std::vector<Timing>& timings, const TuningBudget& budget = kAmple) {
  timings.assign(track.us.size(), {});
  track.runs.resize(track.us.size());
  return Race(track, budget, timings);
}

void TheFastestWins() {
  std::vector<Timing> timings;
  for (size_t fastest = 0; fastest < 4; ++fastest) {
    Track track{{50, 50, 50, 50}, {300, 300, 300, 300}};
    track.us[fastest] = 48;
    CHECK(RaceOf(track, timings) == fastest);
    for (size_t i = 0; i < 4; ++i) {
      CHECK(timings[i].microseconds == track.us[i]);
      CHECK(timings[i].reason.empty());
    }
  }
}

void OneThatWasDisturbedOnceStillWins() {
  std::vector<Timing> timings;
  Track track{{50, 47, 52}, {}};
  track.noise = [](size_t index, int run) { return index == 1 && run == 3 ? 1.5 : 1.0; };
  CHECK(RaceOf(track, timings) == 1);
  Track close{{50, 49}, {}};
  close.noise = [](size_t index, int run) { return index == 1 && run <= 3 ? 1.05 : 1.0; };
  CHECK(RaceOf(close, timings) == 1);  // only the final rounds show it
}

void LoadingIsNotHeldAgainstAnyone() {
  std::vector<Timing> timings;
  Track track{{1700, 1600}, {100, 9'900}};
  CHECK(RaceOf(track, timings) == 1);
}

void OneFarBehindRunsOnce() {
  std::vector<Timing> timings;
  Track track{{1000, 50'000, 900}, {}};
  CHECK(RaceOf(track, timings) == 2);
  CHECK(track.runs[1] == (std::vector<int>{1}));
  CHECK(timings[1].microseconds == 50'000 && timings[1].reason.empty());
  Track behind{{100, 140, 90}, {}};  // behind, but loading might have explained it
  CHECK(RaceOf(behind, timings) == 2);
  CHECK(behind.runs[1] == (std::vector<int>{1, 3}));
}

void LongOnesRunAgainIfThereIsTime() {
  std::vector<Timing> timings;
  Track track{{80'000}, {9'000}};
  CHECK(RaceOf(track, timings) == 0);
  CHECK(track.runs[0] == (std::vector<int>{1, 1}));
  CHECK(timings[0].microseconds == 80'000);  // without loading
  Track late{{80'000}, {9'000}};
  CHECK(RaceOf(late, timings, {1000, 5000, 80'000}) == 0);
  CHECK(late.runs[0] == (std::vector<int>{1}));
  CHECK(timings[0].microseconds == 89'000);
}

void VeryLongOnesRunOnce() {
  std::vector<Timing> timings;
  Track track{{120'000, 40'000}, {9'000, 9'000}};
  CHECK(RaceOf(track, timings, {1000, 5000, 180'000}) == 1);
  CHECK(track.runs[0] == (std::vector<int>{1}));
}

void ShortOnesRunOftenAndTheBudgetOfEachIsKept() {
  std::vector<Timing> timings;
  Track track{{10}, {}};
  CHECK(RaceOf(track, timings) == 0);
  CHECK(track.runs[0] == (std::vector<int>{1, 3, 8}));
  Track slower{{1000}, {}};
  CHECK(RaceOf(slower, timings) == 0);
  CHECK(slower.runs[0] == (std::vector<int>{1, 2, 2}));  // of 5 ms
}

void TheBudgetIsKept() {
  std::vector<Timing> timings;
  Track many{{50, 49, 48, 47}, {}};
  CHECK(RaceOf(many, timings, {2, 5000, 1'000'000}) == 1);
  CHECK(many.runs[2].empty() && many.runs[3].empty());
  CHECK(timings[2].reason == "the budget was spent" && std::isnan(timings[2].microseconds));
  CHECK(timings[3].reason == "the budget was spent");

  Track late{{900, 900, 100}, {}};
  CHECK(RaceOf(late, timings, {1000, 1000, 1100}) == 0);
  CHECK(!late.runs[0].empty());  // the first is timed whatever it costs
  CHECK(late.runs[1].empty() && late.runs[2].empty());
  CHECK(timings[2].reason == "the budget was spent");
}

void FinalsEndWithTheBudgetToo() {
  std::vector<Timing> timings;
  Track track{{100, 100}, {}};
  const size_t fastest = RaceOf(track, timings, {1000, 5000, 1900});
  CHECK(fastest != kNone);
  CHECK(track.runs[0].size() + track.runs[1].size() < 12);
}

void WhatCannotRunIsLeftOut() {
  std::vector<Timing> timings;
  Track track{{10, 50, 60}, {}, {"it computes 1 for 2", "", ""}};
  CHECK(RaceOf(track, timings) == 1);
  CHECK(timings[0].reason == "it computes 1 for 2" && std::isnan(timings[0].microseconds));
  CHECK(timings[0].failed && !timings[1].failed && timings[0].name.empty());
  Track none{{10, 20}, {}, {"no", "no"}};
  CHECK(RaceOf(none, timings) == kNone);
  Track empty{{}, {}};
  CHECK(RaceOf(empty, timings) == kNone);
}

void OnesThatFailDoNotSpendTheBudgetOfOthers() {
  std::vector<Timing> timings;
  Track track{{10, 10, 50, 20}, {}, {"it computes 1 for 2", "it computes 3 for 2"}};
  CHECK(RaceOf(track, timings, {1, 5000, 1'000'000}) == 2);
  CHECK(track.runs[1].size() == 1 && track.runs[3].empty());
  CHECK(timings[3].reason == "the budget was spent" && !timings[3].failed);
  Track late{{10, 50, 20}, {}, {"it computes 1 for 2"}};
  late.clock = 2'000'000;
  CHECK(RaceOf(late, timings, {1000, 5000, 1'000'000}) == 1);
  CHECK(late.runs[2].empty());
}

void OneThatFailsInTheFinalsIsLeftOut() {
  std::vector<Timing> timings;
  Track track{{50, 48}, {}};
  track.noise = [](size_t index, int run) {
    if (index == 1 && run == 4) throw std::runtime_error("no longer");
    return 1.0;
  };
  CHECK(RaceOf(track, timings) == 0);
  CHECK(timings[1].reason == "no longer" && timings[1].failed);
  CHECK(std::isnan(timings[1].microseconds));
  Track both{{50, 50}, {}};
  both.noise = [](size_t, int run) {
    if (run == 4) throw std::runtime_error("no longer");
    return 1.0;
  };
  CHECK(RaceOf(both, timings) == kNone);
}

void FewerAreTriedInLessMemory() {
  const std::vector<size_t> workspaces{512, 0, 4096, 256};
  CHECK(Fitting(workspaces, 1000, static_cast<size_t>(-1)) == (std::vector<size_t>{0, 1, 2, 3}));
  CHECK(Fitting(workspaces, 1000, 1513) == (std::vector<size_t>{0, 1, 3}));
  CHECK(Fitting(workspaces, 1000, 1512) == (std::vector<size_t>{1, 3}));
  CHECK(Fitting(workspaces, 1000, 1001) == (std::vector<size_t>{1}));
  CHECK(Fitting(workspaces, 1000, 1000).empty() && Fitting(workspaces, 1000, 10).empty());
}

void MemoryIsAskedForUntilThereIsRoomForSome() {
  const std::vector<size_t> workspaces{512, 0, 4096, 512};
  const auto room_in = [&](size_t free, size_t limit, std::vector<size_t> asked) {
    std::vector<size_t> found;
    const Room room = MakeRoom(workspaces, 1000, limit, [&](size_t bytes) -> void* {
      found.push_back(bytes);
      return bytes <= free ? &found : nullptr;
    });
    CHECK(found == asked);
    CHECK((room.memory != nullptr) == !room.fitting.empty());
    return room.fitting;
  };
  const auto no_limit = static_cast<size_t>(-1);
  CHECK(room_in(5096, no_limit, {5096}) == (std::vector<size_t>{0, 1, 2, 3}));
  CHECK(room_in(5095, no_limit, {5096, 1512}) == (std::vector<size_t>{0, 1, 3}));
  CHECK(room_in(1511, no_limit, {5096, 1512, 1000}) == (std::vector<size_t>{1}));
  CHECK(room_in(999, no_limit, {5096, 1512, 1000}).empty());
  CHECK(room_in(9999, 5096, {1512}) == (std::vector<size_t>{0, 1, 3}));
  CHECK(room_in(9999, 1000, {}).empty());
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  TheFastestWins();
  OneThatWasDisturbedOnceStillWins();
  LoadingIsNotHeldAgainstAnyone();
  OneFarBehindRunsOnce();
  LongOnesRunAgainIfThereIsTime();
  VeryLongOnesRunOnce();
  ShortOnesRunOftenAndTheBudgetOfEachIsKept();
  TheBudgetIsKept();
  FinalsEndWithTheBudgetToo();
  WhatCannotRunIsLeftOut();
  OnesThatFailDoNotSpendTheBudgetOfOthers();
  OneThatFailsInTheFinalsIsLeftOut();
  FewerAreTriedInLessMemory();
  MemoryIsAskedForUntilThereIsRoomForSome();
  return testing::failures != 0;
}
