// SPDX-License-Identifier: Apache-2.0
#include "plan_cache.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.h"
#include "error.h"
#include "fields.h"
#include "threads.h"

namespace jaxcudnn {

// Outside the unnamed namespace, where the comparison in fields.h would not be found for it.
struct Key {
  int number;
  [[nodiscard]] auto fields() const { return std::make_tuple(Field{"number", number}); }
};

namespace {

using testing::InThreads;
using testing::Throws;

using Cache = PlanCache<Key, std::string>;

/// Builds "plan N" for key N and counts how often.
struct Builder {
  int built = 0;
  Cache::Pointer Get(Cache& cache, int number) {
    return cache.GetOrBuild(Key{number}, [&] {
      ++built;
      return std::make_shared<const std::string>("plan " + std::to_string(number));
    });
  }
};

bool CountersAre(const Cache& cache, int64_t hits, int64_t misses, int64_t evictions,
                 int64_t size) {
  const CacheInfo info = cache.Info();
  return info.hits == hits && info.misses == misses && info.evictions == evictions &&
         info.size == size;
}

void AKeyIsBuiltOnceAndKept() {
  Cache cache(4);
  Builder builder;
  CHECK(CountersAre(cache, 0, 0, 0, 0));
  CHECK(cache.Info().capacity == 4);
  const Cache::Pointer first = builder.Get(cache, 1);
  CHECK(*first == "plan 1");
  CHECK(builder.Get(cache, 1) == first);
  CHECK(*builder.Get(cache, 2) == "plan 2");
  CHECK(builder.built == 2);
  CHECK(CountersAre(cache, 1, 2, 0, 2));
}

void TheLeastRecentlyUsedGoesFirst() {
  Cache cache(2);
  Builder builder;
  const Cache::Pointer first = builder.Get(cache, 1);
  (void)builder.Get(cache, 2);
  (void)builder.Get(cache, 1);  // now 2 is the older
  (void)builder.Get(cache, 3);
  CHECK(CountersAre(cache, 1, 3, 1, 2));
  CHECK(builder.Get(cache, 1) == first);
  CHECK(builder.built == 3);
  (void)builder.Get(cache, 2);  // pushes 3 out
  CHECK(builder.built == 4);
  (void)builder.Get(cache, 1);
  CHECK(builder.built == 4);
  (void)builder.Get(cache, 3);
  CHECK(builder.built == 5);
  CHECK(CountersAre(cache, 3, 5, 3, 2));
}

void CapacityCanChange() {
  Cache cache(3);
  Builder builder;
  for (int number : {1, 2, 3}) (void)builder.Get(cache, number);
  cache.SetCapacity(1);
  CHECK(CountersAre(cache, 0, 3, 2, 1));
  CHECK(cache.Info().capacity == 1);
  (void)builder.Get(cache, 3);  // the one that stayed
  CHECK(builder.built == 3);
  cache.SetCapacity(2);
  for (int number : {1, 3}) (void)builder.Get(cache, number);
  CHECK(CountersAre(cache, 2, 4, 2, 2));
}

void CapacityZeroKeepsNothingAndStillBuilds() {
  Cache cache(0);
  Builder builder;
  CHECK(*builder.Get(cache, 1) == "plan 1");
  CHECK(*builder.Get(cache, 1) == "plan 1");
  CHECK(builder.built == 2);
  CHECK(cache.Info().size == 0);
}

void ClearForgetsButFreesNothingInUse() {
  Cache cache(2);
  Builder builder;
  const Cache::Pointer held = builder.Get(cache, 1);
  const std::weak_ptr<const std::string> dropped = builder.Get(cache, 2);
  cache.Clear();
  CHECK(CountersAre(cache, 0, 0, 0, 0));
  CHECK(cache.Info().capacity == 2);
  CHECK(*held == "plan 1");
  CHECK(dropped.expired());
  (void)builder.Get(cache, 1);
  CHECK(builder.built == 3);
}

void EvictionFreesNothingInUse() {
  Cache cache(1);
  Builder builder;
  const Cache::Pointer held = builder.Get(cache, 1);
  const std::weak_ptr<const std::string> dropped = builder.Get(cache, 2);
  (void)builder.Get(cache, 3);
  CHECK(*held == "plan 1");
  CHECK(dropped.expired());
}

/// Calls for key 0 twice with a build that throws, and returns how often it ran.
template <typename Throw>
int BuildsOfFailing(Cache& cache, ErrorCode code, const Throw& thrower) {
  int built = 0;
  for (int call = 0; call < 2; ++call) {
    CHECK(Throws(code, "no luck", [&] {
      (void)cache.GetOrBuild(Key{0}, [&]() -> Cache::Pointer {
        ++built;
        thrower();
        return nullptr;
      });
    }));
  }
  return built;
}

void ThatThereIsNoPlanIsRemembered() {
  Cache cache(2);
  const auto thrower = [] { throw Error(ErrorCode::kUnsupported, "no luck"); };
  CHECK(BuildsOfFailing(cache, ErrorCode::kUnsupported, thrower) == 1);
  CHECK(CountersAre(cache, 1, 1, 0, 1));
  Builder builder;
  for (int number : {1, 2}) (void)builder.Get(cache, number);  // it is evicted like a plan
  CHECK(*builder.Get(cache, 0) == "plan 0");
}

void OtherFailuresAreTriedAgain() {
  for (ErrorCode code : {ErrorCode::kInvalidArgument, ErrorCode::kResourceExhausted,
                         ErrorCode::kFailedPrecondition, ErrorCode::kInternal}) {
    Cache cache(2);
    const auto thrower = [code] { throw Error(code, "no luck"); };
    CHECK(BuildsOfFailing(cache, code, thrower) == 2);
    CHECK(CountersAre(cache, 0, 2, 0, 0));
    Builder builder;
    CHECK(*builder.Get(cache, 0) == "plan 0");
  }
  Cache cache(2);
  for (int call = 0; call < 2; ++call) {
    bool thrown = false;
    try {
      (void)cache.GetOrBuild(Key{0}, []() -> Cache::Pointer { throw std::bad_alloc(); });
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    CHECK(thrown);
  }
  CHECK(CountersAre(cache, 0, 2, 0, 0));
}

void ThreadsThatAskForOneKeyBuildItOnce() {
  constexpr int kThreads = 8;
  Cache cache(2);
  std::atomic<int> built{0};
  std::vector<Cache::Pointer> found(kThreads);
  InThreads(kThreads, [&](int i) {
    found[static_cast<size_t>(i)] = cache.GetOrBuild(Key{1}, [&] {
      ++built;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return std::make_shared<const std::string>("plan");
    });
  });
  CHECK(built == 1);
  for (const Cache::Pointer& pointer : found) CHECK(pointer && pointer == found[0]);
  CHECK(CountersAre(cache, kThreads - 1, 1, 0, 1));
}

void ThreadsThatWaitForAFailureAllSeeIt() {
  Cache cache(2);
  std::atomic<int> seen{0};
  InThreads(8, [&](int) {
    seen += Throws(ErrorCode::kUnsupported, "no luck", [&] {
      (void)cache.GetOrBuild(Key{1}, []() -> Cache::Pointer {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        throw Error(ErrorCode::kUnsupported, "no luck");
      });
    });
  });
  CHECK(seen == 8);
}

void OneSlowBuildDoesNotHoldUpOtherKeys() {
  Cache cache(4);
  std::atomic<bool> other_done{false};
  // The first key's build ends only when the second key's has: under one lock neither would.
  InThreads(2, [&](int i) {
    (void)cache.GetOrBuild(Key{i}, [&, i] {
      if (i == 0) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!other_done && std::chrono::steady_clock::now() < deadline) {
          std::this_thread::yield();
        }
        CHECK(other_done);
      }
      return std::make_shared<const std::string>("plan");
    });
    if (i == 1) other_done = true;
  });
}

void ManyThreadsInASmallCache() {
  Cache cache(3);
  std::atomic<int> wrong{0};
  InThreads(8, [&](int i) {
    for (int step = 0; step < 2000; ++step) {
      const int number = (step * (i + 1)) % 7;
      const Cache::Pointer plan = cache.GetOrBuild(Key{number}, [&] {
        return std::make_shared<const std::string>("plan " + std::to_string(number));
      });
      wrong += *plan != "plan " + std::to_string(number);
      if (step % 500 == 499) cache.SetCapacity(static_cast<size_t>(i % 4));
    }
  });
  const CacheInfo info = cache.Info();
  CHECK(wrong == 0);
  CHECK(info.hits + info.misses == 8 * 2000);
  CHECK(info.size <= info.capacity);
}

Cache::Pointer Text(const char* text) { return std::make_shared<const std::string>(text); }

void FindBuildsNothing() {
  Cache cache(4);
  Builder builder;
  CHECK(cache.Find(Key{1}) == nullptr);
  CHECK(CountersAre(cache, 0, 0, 0, 0));
  const Cache::Pointer first = builder.Get(cache, 1);
  CHECK(cache.Find(Key{1}) == first);
  CHECK(CountersAre(cache, 1, 1, 0, 1));
  const auto none = [&] {
    return cache.GetOrBuild(
        Key{2}, []() -> Cache::Pointer { throw Error(ErrorCode::kUnsupported, "there is none"); });
  };
  CHECK(Throws(ErrorCode::kUnsupported, "there is none", [&] { (void)none(); }));
  CHECK(Throws(ErrorCode::kUnsupported, "there is none", [&] { (void)cache.Find(Key{2}); }));
}

void FindDoesNotWait() {
  Cache cache(4);
  (void)cache.GetOrBuild(Key{1}, [&] {
    CHECK(cache.Find(Key{1}) == nullptr);  // it is being built
    return Text("late");
  });
  CHECK(*cache.Find(Key{1}) == "late");
}

void FindMakesAKeyRecent() {
  Cache cache(2);
  Builder builder;
  (void)builder.Get(cache, 1);
  (void)builder.Get(cache, 2);
  CHECK(cache.Find(Key{1}) != nullptr);
  (void)builder.Get(cache, 3);
  CHECK(cache.Find(Key{1}) != nullptr && cache.Find(Key{2}) == nullptr);
}

void PutTakesThePlaceOfWhatThereIs() {
  Cache cache(2);
  Builder builder;
  (void)builder.Get(cache, 1);
  cache.Put(Key{1}, Text("better"));
  CHECK(*builder.Get(cache, 1) == "better" && builder.built == 1);
  cache.Put(Key{2}, Text("new"));
  CHECK(*cache.Find(Key{2}) == "new");
  cache.Put(Key{3}, Text("newer"));
  CHECK(cache.Info().size == 2 && cache.Info().evictions == 1);
  Cache nothing(0);
  nothing.Put(Key{1}, Text("lost"));
  CHECK(nothing.Find(Key{1}) == nullptr && nothing.Info().size == 0);
}

void WorkIsCounted() {
  Cache cache(4);
  const auto slow = [](bool works) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (!works) throw Error(ErrorCode::kInternal, "it failed");
    return Text("slow");
  };
  (void)cache.GetOrBuild(Key{1}, [&] { return slow(true); });
  CHECK(cache.Info().builds == 1 && cache.Info().seconds >= 0.02);
  CHECK(Throws(ErrorCode::kInternal, "it failed",
               [&] { (void)cache.GetOrBuild(Key{2}, [&] { return slow(false); }); }));
  CHECK(cache.Info().builds == 1 && cache.Info().misses == 2 && cache.Info().seconds >= 0.04);
  CHECK(cache.Info().seconds < 2);
}

void SumIsOfTheValuesThatThereAre() {
  Cache cache(2);
  Builder builder;
  const auto length = [](const std::string& text) { return static_cast<int64_t>(text.size()); };
  CHECK(cache.Sum(length) == 0);
  (void)builder.Get(cache, 1);
  cache.Put(Key{2}, Text("new"));
  CHECK(cache.Sum(length) == 6 + 3);
  cache.Put(Key{2}, Text("newer"));
  CHECK(cache.Sum(length) == 6 + 5);
  (void)builder.Get(cache, 30);  // which evicts 1
  CHECK(cache.Sum(length) == 5 + 7);
  cache.Clear();
  CHECK(cache.Sum(length) == 0);
}

}  // namespace
}  // namespace jaxcudnn

int main() {
  using namespace jaxcudnn;
  AKeyIsBuiltOnceAndKept();
  TheLeastRecentlyUsedGoesFirst();
  CapacityCanChange();
  CapacityZeroKeepsNothingAndStillBuilds();
  ClearForgetsButFreesNothingInUse();
  EvictionFreesNothingInUse();
  ThatThereIsNoPlanIsRemembered();
  OtherFailuresAreTriedAgain();
  ThreadsThatAskForOneKeyBuildItOnce();
  ThreadsThatWaitForAFailureAllSeeIt();
  OneSlowBuildDoesNotHoldUpOtherKeys();
  ManyThreadsInASmallCache();
  FindBuildsNothing();
  FindDoesNotWait();
  FindMakesAKeyRecent();
  PutTakesThePlaceOfWhatThereIs();
  WorkIsCounted();
  SumIsOfTheValuesThatThereAre();
  return testing::failures != 0;
}
