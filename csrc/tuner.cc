// SPDX-License-Identifier: Apache-2.0
#include "tuner.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "cudart.h"
#include "error.h"
#include "handle_pool.h"
#include "host_reference.h"
#include "libraries.h"

namespace jaxcudnn {
namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr size_t kAlignment = 256;  // as XLA aligns its own buffers
size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t SizeOf(const ConvSpec& spec, Operand operand) {
  return static_cast<size_t>(BytesOf(spec, operand));
}

class Event {
 public:
  Event() { CheckCuda(Cudart().event_create(&event_, cudaEventDefault), "cudaEventCreate"); }
  ~Event() { (void)Cudart().event_destroy(event_); }
  Event(const Event&) = delete;  // owns the event
  Event& operator=(const Event&) = delete;

  void Record(cudaStream_t stream) const {
    CheckCuda(Cudart().event_record(event_, stream), "cudaEventRecord");
  }
  /// Waits for this event, and gives the microseconds between the other and it.
  [[nodiscard]] double Since(const Event& start) const {
    CheckCuda(Cudart().event_synchronize(event_), "cudaEventSynchronize");
    float milliseconds = 0;
    CheckCuda(Cudart().event_elapsed_time(&milliseconds, start.event_, event_),
              "cudaEventElapsedTime");
    return 1000.0 * milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Holds a stream back while the host enqueues, so that short kernels are not timed at the host's
/// pace. It opens by itself after a while, for an enqueue that waits for the device itself.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    auto open = std::make_unique<Flag>(open_);
    CheckCuda(Cudart().launch_host_function(stream, &Wait, open.get()), "cudaLaunchHostFunc");
    (void)open.release();  // Wait has it now
  }
  ~Gate() { open_->store(true, std::memory_order_release); }
  Gate(const Gate&) = delete;  // one gate, one scope
  Gate& operator=(const Gate&) = delete;

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;

  static void Wait(void* argument) {
    const std::unique_ptr<Flag> open(static_cast<Flag*>(argument));
    const auto deadline = Clock::now() + std::chrono::milliseconds(2);
    while (!(*open)->load(std::memory_order_acquire) && Clock::now() < deadline) {
      std::this_thread::yield();
    }
  }

  Flag open_ = std::make_shared<std::atomic<bool>>(false);
};

/// The arrays of a convolution, and the largest workspace, in one allocation.
class Arrays {
 public:
  Arrays(const ConvSpec& spec, void* memory) : spec_(spec) {
    char* next = static_cast<char*>(memory);
    for (Operand operand : kAllOperands) {
      const size_t bytes = SizeOf(spec, operand);
      buffers_[static_cast<size_t>(operand)] = bytes == 0 ? nullptr : next;
      next += RoundUp(bytes);
    }
    workspace_ = next;
  }

  static size_t Bytes(const ConvSpec& spec) {
    size_t bytes = 0;
    for (Operand operand : kAllOperands) bytes += RoundUp(SizeOf(spec, operand));
    return bytes;
  }

  [[nodiscard]] const Buffers& buffers() const { return buffers_; }
  [[nodiscard]] void* workspace() const { return workspace_; }
  [[nodiscard]] void* at(Operand operand) const { return buffers_[static_cast<size_t>(operand)]; }

  /// Fills everything with ordinary numbers: what a number is changes no plan's speed, except that
  /// zeros take less power.
  void Fill(cudaStream_t stream) const {
    constexpr int kByte = 0x3c;  // 1.06 in float16, 0.0115 in bfloat16 and float32
    CheckCuda(Cudart().memset_async(buffers_[0], kByte, Bytes(spec_), stream), "cudaMemsetAsync");
  }

  /// Fills an operand with its pattern, by doubling what is there.
  void FillWithPattern(Operand operand, cudaStream_t stream) const {
    const std::vector<unsigned char> once = Encode(Pattern(operand), spec_.dtype);
    const size_t bytes = SizeOf(spec_, operand);
    char* start = static_cast<char*>(at(operand));
    size_t filled = std::min(bytes, once.size());
    CheckCuda(Cudart().memcpy_async(start, once.data(), filled, cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
    CheckCuda(Cudart().stream_synchronize(stream), "cudaStreamSynchronize");  // `once` ends here
    while (filled < bytes) {
      const size_t more = std::min(filled, bytes - filled);
      CopyOnDevice(start + filled, start, more, stream);
      filled += more;
    }
  }

 private:
  const ConvSpec& spec_;
  Buffers buffers_{};
  void* workspace_ = nullptr;
};

/// Waits for a stream when it goes, and so also when something was thrown: the memory that is in
/// use there goes back to the pool then, where others may have it on other streams.
class Drain {
 public:
  explicit Drain(cudaStream_t stream) : stream_(stream) {}
  ~Drain() { (void)Cudart().stream_synchronize(stream_); }
  Drain(const Drain&) = delete;  // one scope, one drain
  Drain& operator=(const Drain&) = delete;

 private:
  cudaStream_t stream_;
};

/// Compares a result on the device with samples computed on the host.
class Verifier {
 public:
  Verifier(const Problem& problem, const Arrays& arrays, cudaStream_t stream)
      : problem_(problem), arrays_(arrays), stream_(stream), samples_(Samples(problem.spec)) {
    for (Operand operand : kAllOperands) {
      if (operand != Operand::kResult && arrays.at(operand))
        arrays.FillWithPattern(operand, stream);
    }
  }

  /// Makes sure that nothing right is left from a run before.
  void Poison() const {
    constexpr int kNan = 0xff;
    CheckCuda(Cudart().memset_async(arrays_.at(Operand::kResult), kNan,
                                    SizeOf(problem_.spec, Operand::kResult), stream_),
              "cudaMemsetAsync");
  }

  void Check() const {
    const DataType dtype = problem_.spec.dtype;
    const auto bytes = static_cast<size_t>(RowOf(dtype).bytes);
    std::vector<unsigned char> computed(samples_.size() * bytes);
    for (size_t i = 0; i < samples_.size(); ++i) {
      const auto offset = static_cast<size_t>(samples_[i].index) * bytes;
      CheckCuda(Cudart().memcpy_async(&computed[i * bytes],
                                      static_cast<char*>(arrays_.at(Operand::kResult)) + offset,
                                      bytes, cudaMemcpyDeviceToHost, stream_),
                "cudaMemcpyAsync");
    }
    CheckCuda(Cudart().stream_synchronize(stream_), "cudaStreamSynchronize");
    const Slack slack = SlackOf(problem_.spec, problem_.options.allow_reduced_precision_reduction);
    for (size_t i = 0; i < samples_.size(); ++i) {
      const double got = Decode(&computed[i * bytes], dtype);
      if (!Agrees(got, samples_[i].exact, dtype, slack)) {
        throw Error(ErrorCode::kInternal, "it computes " + std::to_string(got) + " for " +
                                              std::to_string(samples_[i].exact) + " at element " +
                                              std::to_string(samples_[i].index) + " of the result");
      }
    }
  }

 private:
  const Problem& problem_;
  const Arrays& arrays_;
  cudaStream_t stream_;
  std::vector<Sample> samples_;
};

/// The track of `Race`: runs candidates on a device.
class DeviceTrack {
 public:
  DeviceTrack(const std::vector<PlanPointer>& plans, const Bench& bench, const Arrays& arrays,
              const Verifier* verifier)
      : plans_(plans),
        bench_(bench),
        arrays_(arrays),
        verifier_(verifier),
        has_run_(plans.size()) {}

  [[nodiscard]] double Elapsed() const { return Microseconds(Clock::now() - start_).count(); }

  double Run(size_t index, int repetitions) {
    const bool is_first = !has_run_[index];
    has_run_[index] = true;
    if (is_first && verifier_) verifier_->Poison();
    const double us = Launch(index, repetitions, !is_first);
    if (is_first && verifier_) verifier_->Check();
    if (!has_settled_) SettleClocks(index);
    return us;
  }

 private:
  /// Lets a GPU that was idle reach the clocks at which it will stay, lest the first be slow.
  void SettleClocks(size_t index) {
    constexpr double kWhile_us = 2000;
    constexpr int kMostRuns = 50;
    has_settled_ = true;
    for (int i = 0; i < kMostRuns && Elapsed() < kWhile_us; ++i) (void)Launch(index, 1, false);
  }

  double Launch(size_t index, int repetitions, bool gated) {
    {
      HandleLease lease(HandleOf(bench_.device), bench_.stream);
      std::optional<Gate> gate;
      if (gated) gate.emplace(bench_.stream);
      before_.Record(bench_.stream);
      for (int i = 0; i < repetitions; ++i) {
        plans_[index]->Execute(lease.get(), arrays_.buffers(), arrays_.workspace());
      }
      after_.Record(bench_.stream);
    }
    return after_.Since(before_) / repetitions;
  }

  const std::vector<PlanPointer>& plans_;
  const Bench& bench_;
  const Arrays& arrays_;
  const Verifier* verifier_;
  std::vector<bool> has_run_;
  bool has_settled_ = false;
  Event before_, after_;
  Clock::time_point start_ = Clock::now();
};

/// The bytes that XLA's pool has been seen not to have. A request that it cannot serve blocks for
/// ten seconds, so for a minute after one the next ask for half as much at most.
class Shortage {
 public:
  static Shortage& Get() {
    static auto* shortage = new Shortage;
    return *shortage;
  }

  [[nodiscard]] size_t limit() {
    std::lock_guard<std::mutex> lock(mutex_);
    return Clock::now() < end_ ? limit_ : std::numeric_limits<size_t>::max();
  }

  void Add(size_t refused) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = refused / 2;
    end_ = Clock::now() + std::chrono::minutes(1);
  }

 private:
  std::mutex mutex_;
  size_t limit_ = 0;
  Clock::time_point end_ = Clock::time_point::min();
};

/// Plans of one GPU are timed one convolution after another: two at once would each be timed with
/// the other's kernels in the way, and spend the budget waiting for them.
std::mutex& TurnOf(int device) {
  static auto* turns = new std::array<std::mutex, kMaxDevices>;
  return turns->at(static_cast<size_t>(device));
}

constexpr const char* kMemoryIsShort = "memory is short";

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CheckCuda(Cudart().stream_is_capturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// Allocates until it takes long to be refused.
class Allocator {
 public:
  explicit Allocator(const Bench& bench) : bench_(bench) {}

  void* operator()(size_t bytes) {
    constexpr auto kLong = std::chrono::seconds(1);
    if (was_slow_) return nullptr;
    const auto start = Clock::now();
    void* memory = bench_.allocate(bytes);
    was_slow_ = !memory && Clock::now() - start > kLong;
    if (was_slow_) Shortage::Get().Add(bytes);
    return memory;
  }

 private:
  const Bench& bench_;
  bool was_slow_ = false;
};

}  // namespace

int64_t Tuning::tried() const {
  return std::count_if(timings.begin(), timings.end(),
                       [](const Timing& timing) { return timing.reason.empty(); });
}

size_t BytesToTune(const Problem& problem, const std::vector<PlanPointer>& candidates) {
  int64_t workspace = 0;
  for (const PlanPointer& plan : candidates) {
    workspace = std::max(workspace, plan->workspace_size());
  }
  return Arrays::Bytes(problem.spec) + RoundUp(static_cast<size_t>(workspace));
}

Tuning Tune(const Problem& problem, const std::vector<PlanPointer>& candidates,
            const Bench& bench) {
  const auto start = Clock::now();
  const DeviceScope scope(bench.device);
  Tuning tuning;
  for (const PlanPointer& plan : candidates) {
    tuning.timings.emplace_back().name = plan->name();
  }

  const auto give_up = [&tuning](const char* reason) {
    for (Timing& timing : tuning.timings) timing.reason = reason;
    return tuning;
  };
  if (IsCapturing(bench.stream)) return give_up("the stream is being captured");

  std::vector<size_t> workspaces;
  for (const PlanPointer& plan : candidates) {
    workspaces.push_back(RoundUp(static_cast<size_t>(plan->workspace_size())));
  }
  const auto [numbers, memory] =
      MakeRoom(workspaces, Arrays::Bytes(problem.spec), Shortage::Get().limit(), Allocator(bench));
  if (!memory) return give_up(kMemoryIsShort);
  std::vector<PlanPointer> plans;
  for (size_t number : numbers) plans.push_back(candidates[number]);
  const Drain drain(bench.stream);
  const Arrays arrays(problem.spec, memory);
  arrays.Fill(bench.stream);
  std::optional<Verifier> verifier;
  if (problem.options.verify) verifier.emplace(problem, arrays, bench.stream);
  // What was queued before is not to count against the budget.
  CheckCuda(Cudart().stream_synchronize(bench.stream), "cudaStreamSynchronize");
  const std::lock_guard<std::mutex> turn(TurnOf(bench.device));
  DeviceTrack track(plans, bench, arrays, verifier ? &*verifier : nullptr);
  TuningBudget budget{problem.options.tuning_candidates, problem.options.tuning_candidate_us,
                      problem.options.tuning_us};
  if (problem.options.is_exhaustive()) {
    budget.candidates = budget.total_us = std::numeric_limits<int64_t>::max();
  }
  std::vector<Timing> timings;
  for (size_t number : numbers) timings.push_back(tuning.timings[number]);
  const size_t fastest = Race(track, budget, timings);
  if (fastest != kNone) tuning.fastest = numbers[fastest];
  for (Timing& timing : tuning.timings) timing.reason = kMemoryIsShort;
  for (size_t i = 0; i < timings.size(); ++i) tuning.timings[numbers[i]] = timings[i];
  CheckCuda(Cudart().stream_synchronize(bench.stream), "cudaStreamSynchronize");
  tuning.milliseconds = Microseconds(Clock::now() - start).count() / 1000;
  return tuning;
}

}  // namespace jaxcudnn
