// Threads that work through stages of items together.
//
// A stage is done when all of its items are, whoever did them: a thread that never comes, or comes late, is not waited
// for. So any number of threads may enter, and a stage works as a barrier without counting them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "simd.h"

// Calls body(context, thread) for thread 0 .. threads - 1, on several threads or one after another.
extern "C" void draftwise_fork(void (*body)(void*, int), void* context, int threads);
extern "C" int draftwise_threads();

namespace dw {

class Stages {
 public:
  Stages(int stages, int threads)
      : threads_(threads), slots_(static_cast<Slot*>(std::aligned_alloc(64, sizeof(Slot) * stages * (threads + 1)))) {
    for (int i = 0; i < stages * (threads + 1); ++i) new (&slots_[i]) Slot{};
  }
  ~Stages() { std::free(slots_); }
  Stages(const Stages&) = delete;

  // Run f(item) for this thread's share of the items, then for what others have not begun, then wait for the rest.
  template <class Function>
  void run(int stage, int thread, int items, Function f) {
    Slot* queues = slots_ + stage * (threads_ + 1);
    std::atomic<int>& done = queues[threads_].value;
    int mine = 0;
    for (int t = 0; t < threads_; ++t) {
      const int owner = (thread + t) % threads_;
      const int begin = int64_t(items) * owner / threads_, end = int64_t(items) * (owner + 1) / threads_;
      std::atomic<int>& next = queues[owner].value;
      if (next.load(std::memory_order_relaxed) >= end - begin) continue;
      for (int i; (i = begin + next.fetch_add(1, std::memory_order_relaxed)) < end; ++mine) f(i);
    }
    if (done.fetch_add(mine, std::memory_order_acq_rel) + mine == items) return;
    for (int spins = 0; done.load(std::memory_order_acquire) < items; ++spins)
      if (spins < 4096)
        pause();
      else
        sched_yield();
  }

 private:
  struct alignas(64) Slot {
    std::atomic<int> value{0};
  };
  const int threads_;
  Slot* const slots_;
};

// Run body(thread) on the team, for which `work` gives no more threads than items are worth.
template <class Body>
void fork(int threads, Body body) {
  draftwise_fork([](void* context, int thread) { (*static_cast<Body*>(context))(thread); }, &body, threads);
}

// Sixty-four-byte aligned memory that grows and is reused.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  template <class T>
  T* of(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      if (!data_) std::abort();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace dw
