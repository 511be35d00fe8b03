// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "error.h"
#include "fields.h"

namespace jaxcudnn {

struct CacheInfo {
  int64_t hits = 0;
  int64_t misses = 0;  ///< look-ups that had to build
  int64_t builds = 0;  ///< misses that gave a value
  int64_t evictions = 0;
  int64_t size = 0;
  int64_t capacity = 0;
  double seconds = 0;  ///< spent building, failures included
};

/// A bounded map from keys to values that are expensive to build; the least recently used goes
/// first. Each key is built once, outside the lock, while others who ask for it wait. That there is
/// no such value (Error with kUnsupported) is remembered like a value; other failures are not.
template <typename Key, typename Value>
class PlanCache {
 public:
  using Pointer = std::shared_ptr<const Value>;

  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  template <typename Build>
  [[nodiscard]] Pointer GetOrBuild(const Key& key, const Build& build) {
    std::promise<Pointer> promise;
    std::shared_future<Pointer> future;
    bool found = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (auto it = entries_.find(key); it != entries_.end()) {
        ++info_.hits;
        recent_.splice(recent_.begin(), recent_, it->second.position);
        future = it->second.future;
        found = true;
      } else {
        ++info_.misses;
        future = promise.get_future().share();
        Insert(key, future);
      }
    }
    if (!found) Fulfil(key, promise, build);
    return future.get();
  }

  /// The value that is there already; null if there is none, or none yet.
  [[nodiscard]] Pointer Find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = entries_.find(key);
    if (it == entries_.end() || !IsReady(it->second.future)) return nullptr;
    ++info_.hits;
    recent_.splice(recent_.begin(), recent_, it->second.position);
    return it->second.future.get();  // throws what is remembered instead of a value
  }

  /// Puts a value in the place of whatever there is.
  void Put(const Key& key, Pointer value) {
    std::promise<Pointer> promise;
    promise.set_value(value);
    std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.find(key) == entries_.end()) Insert(key, {});
    if (auto it = entries_.find(key); it != entries_.end()) {  // a cache may keep nothing
      it->second.future = promise.get_future().share();
      it->second.value = std::move(value);
    }
  }

  /// Drops an entry, if there is one.
  void Forget(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto it = entries_.find(key); it != entries_.end()) {
      recent_.erase(it->second.position);
      entries_.erase(it);
    }
  }

  /// Drops every entry; values still in use elsewhere live on there.
  void Clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
    recent_.clear();
    info_ = {};
  }

  void SetCapacity(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
    EvictBeyond(capacity_);
  }

  [[nodiscard]] CacheInfo Info() const {
    std::lock_guard<std::mutex> lock(mutex_);
    CacheInfo info = info_;
    info.size = static_cast<int64_t>(entries_.size());
    info.capacity = static_cast<int64_t>(capacity_);
    return info;
  }

  /// The sum over all values of what `size` says of each.
  template <typename Size>
  [[nodiscard]] int64_t Sum(const Size& size) const {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t sum = 0;
    for (const auto& [key, entry] : entries_) {
      if (entry.value) sum += size(*entry.value);
    }
    return sum;
  }

 private:
  struct Entry {
    std::shared_future<Pointer> future;
    typename std::list<Key>::iterator position;
    Pointer value = nullptr;  // that of the future, once there is one
  };

  static bool IsReady(const std::shared_future<Pointer>& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  void Insert(const Key& key, std::shared_future<Pointer> future) {
    recent_.push_front(key);
    entries_.emplace(key, Entry{std::move(future), recent_.begin()});
    EvictBeyond(capacity_);
  }

  template <typename Build>
  void Fulfil(const Key& key, std::promise<Pointer>& promise, const Build& build) {
    const auto start = std::chrono::steady_clock::now();
    const auto account = [&](int64_t built) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      std::lock_guard<std::mutex> lock(mutex_);
      info_.builds += built;
      info_.seconds += spent.count();
    };
    try {
      Pointer value = build();
      account(1);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (auto it = entries_.find(key); it != entries_.end()) it->second.value = value;
      }
      promise.set_value(std::move(value));
    } catch (const Error& error) {
      account(0);
      if (error.code() != ErrorCode::kUnsupported) Forget(key);
      promise.set_exception(std::current_exception());
    } catch (...) {
      account(0);
      Forget(key);
      promise.set_exception(std::current_exception());
    }
  }

  void EvictBeyond(size_t count) {
    while (entries_.size() > count) {
      entries_.erase(recent_.back());
      recent_.pop_back();
      ++info_.evictions;
    }
  }

  mutable std::mutex mutex_;
  size_t capacity_;
  CacheInfo info_;
  std::list<Key> recent_;  // most recently used first
  std::unordered_map<Key, Entry, FieldsHash> entries_;
};

}  // namespace jaxcudnn
