// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace jaxcudnn {

/// Host time spent in the handlers, for benchmarks: off unless asked for, and then two clock
/// readings a section.
class StageClock {
 public:
  enum Section { kInitialize, kExecute, kEnqueue, kSections };

  static StageClock& Get() {
    static auto* clock = new StageClock;
    return *clock;
  }

  /// Starts afresh, forgetting earlier samples, or stops and keeps them.
  void Enable(bool on) {
    if (on) {
      for (Ring& ring : rings_) ring.next = 0;
    }
    on_.store(on, std::memory_order_relaxed);
  }
  [[nodiscard]] bool on() const { return on_.load(std::memory_order_relaxed); }

  /// The nanoseconds of the latest visits of a section, at most kKept of them.
  [[nodiscard]] std::vector<uint32_t> Samples(Section section) const {
    const Ring& ring = rings_[section];
    const size_t count = std::min<size_t>(ring.next, kKept);
    return {ring.nanoseconds.begin(), ring.nanoseconds.begin() + static_cast<ptrdiff_t>(count)};
  }

  void Record(Section section, std::chrono::nanoseconds duration) {
    Ring& ring = rings_[section];
    ring.nanoseconds[ring.next++ % kKept] = static_cast<uint32_t>(duration.count());
  }

 private:
  static constexpr size_t kKept = 1 << 14;
  struct Ring {
    std::atomic<size_t> next{0};
    std::array<uint32_t, kKept> nanoseconds{};
  };
  std::atomic<bool> on_{false};
  std::array<Ring, kSections> rings_;
};

/// Times the enclosing scope as one visit of `section`.
class SectionTimer {
 public:
  explicit SectionTimer(StageClock::Section section)
      : section_(section), on_(StageClock::Get().on()) {
    if (on_) start_ = std::chrono::steady_clock::now();
  }
  ~SectionTimer() {
    if (on_) StageClock::Get().Record(section_, std::chrono::steady_clock::now() - start_);
  }
  SectionTimer(const SectionTimer&) = delete;  // one scope, one visit
  SectionTimer& operator=(const SectionTimer&) = delete;

 private:
  StageClock::Section section_;
  bool on_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace jaxcudnn
