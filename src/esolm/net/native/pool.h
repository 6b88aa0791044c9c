// Threads: a pool of our own, or those of an OpenMP that the process already runs, and the barrier between phases.
#pragma once
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <new>

namespace {
constexpr int LINE = 64;    // bytes in a cache line
constexpr int SPIN = 2000;  // pauses, some 50 microseconds, before a waiting thread gives its core away

// A thread that waits for its like must not burn a core that another process needs: it spins while the wait is as short
// as a phase, and yields after that.
template <class Done>
void wait_until(Done done) {
  for (int i = 0; !done(); i++) i < SPIN ? _mm_pause() : (void)sched_yield();
}

// One barrier and one counter of work for each phase of a step.
struct Team {
  struct alignas(LINE) Counter {
    std::atomic<int> next{0};
  };
  Counter* counters;
  alignas(LINE) std::atomic<int> arrived{0};
  alignas(LINE) std::atomic<int> epoch{0};

  explicit Team(Counter* c) : counters(c) {}

  void wait(int threads) {
    if (threads == 1) return;
    const int now = epoch.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived.store(0, std::memory_order_relaxed);
      epoch.store(now + 1, std::memory_order_release);
      return;
    }
    wait_until([&] { return epoch.load(std::memory_order_acquire) != now; });
  }
};

// One thread's view of a step. Every thread runs the same phases, in the same order.
struct Worker {
  Team& team;
  int id, threads;
  int phase = 0;

  // One phase: f(first, end) over all numbers below n, in chunks that go to whichever thread is free.
  template <class F>
  void each(int n, F f) {
    std::atomic<int>& next = team.counters[phase++].next;
    const int chunk = threads == 1 ? std::max(n, 1) : std::max(1, n / (threads * 3));
    for (int i; (i = next.fetch_add(chunk, std::memory_order_relaxed)) < n;) f(i, std::min(n, i + chunk));
    team.wait(threads);
  }
};

typedef void (*Job)(void* data, int id, int threads);

// Threads that sleep between jobs. A pool belongs to one process: after a fork its threads are gone and its lock may be
// held by nobody, so that a child makes a new pool and leaves the old memory alone.
class Pool {
 public:
  static Pool& current() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* found = pool.load(std::memory_order_acquire);
    while (!found || found->pid_ != getpid()) {
      Pool* made = new (malloc(sizeof(Pool))) Pool;  // malloc: so that the C++ library is not needed at run time
      if (pool.compare_exchange_strong(found, made)) return *made;
      free(made);
    }
    return *found;
  }

  // f(data, id, threads) on every thread, this one included. One job at a time: a second caller waits.
  void run(Job job, void* data, int threads) {
    pthread_mutex_lock(&turn_);
    threads = grow(threads);
    pthread_mutex_lock(&lock_);
    job_ = job, data_ = data, wanted_ = threads;
    running_.store(threads - 1, std::memory_order_relaxed);
    number_.fetch_add(1, std::memory_order_release);
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&lock_);
    job(data, 0, threads);
    wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
    pthread_mutex_unlock(&turn_);
  }

 private:
  struct Start {
    Pool* pool;
    int id;
    uint64_t seen;
  };

  int grow(int threads) {  // the number there is, where the system refuses more
    while (made_ < threads - 1) {
      Start* start = new (malloc(sizeof(Start))) Start{this, made_ + 1, number_.load(std::memory_order_relaxed)};
      pthread_t thread;
      if (pthread_create(&thread, nullptr, loop, start)) {
        free(start);
        break;
      }
      pthread_detach(thread);
      made_++;
    }
    return std::min(threads, made_ + 1);
  }

  static void* loop(void* argument) {
    const Start start = *(Start*)argument;
    free(argument);
    Pool& pool = *start.pool;
    for (uint64_t seen = start.seen;; seen++) {
      for (int i = 0; i < SPIN && pool.number_.load(std::memory_order_acquire) == seen; i++) _mm_pause();
      pthread_mutex_lock(&pool.lock_);
      while (pool.number_.load(std::memory_order_relaxed) == seen) pthread_cond_wait(&pool.wake_, &pool.lock_);
      const Job job = pool.job_;
      void* const data = pool.data_;
      const int threads = pool.wanted_;
      pthread_mutex_unlock(&pool.lock_);
      if (start.id < threads) {
        job(data, start.id, threads);
        pool.running_.fetch_sub(1, std::memory_order_release);
      }
    }
    return nullptr;
  }

  const pid_t pid_ = getpid();
  pthread_mutex_t turn_ = PTHREAD_MUTEX_INITIALIZER, lock_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER;
  std::atomic<uint64_t> number_{0};  // jobs begun
  std::atomic<int> running_{0};
  Job job_ = nullptr;
  void* data_ = nullptr;
  int wanted_ = 0, made_ = 0;
};

// PyTorch's own threads spin for milliseconds after each of its operations and would take the core from ours, so that a
// step runs on them where its OpenMP is known; not in a forked child, where GNU OpenMP waits for threads that are gone.
typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);
struct {
  GompParallel parallel;
  int (*threads)();
  pid_t pid;
} openmp = {nullptr, nullptr, 0};

template <class F>
void parallel(int threads, F f) {  // f(id, threads) on every thread
  if (threads <= 1) return f(0, 1);
  if (openmp.parallel && openmp.pid == getpid()) {
    struct Shared {
      F& f;
      std::atomic<int> next;
    } shared{f, {0}};
    auto start = [](void* p) {
      Shared& s = *(Shared*)p;
      const int id = s.next.fetch_add(1);
      s.f(id, openmp.threads());
    };
    return openmp.parallel(start, &shared, unsigned(threads), 0);
  }
  Pool::current().run([](void* p, int id, int count) { (*(F*)p)(id, count); }, &f, threads);
}
}  // namespace
