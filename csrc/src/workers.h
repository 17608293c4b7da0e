// Sharing the pieces of one call among threads.
//
// Threads are made for the call and joined in it; the caller is one of them and begins at once. A pool would save the
// 20-40 us that a thread takes to start, during which the caller already works; in return nothing has to survive a
// fork (engines fork after this library was loaded), nothing is left to join at exit or dlclose, and callers that
// come at once do not wait for one another.
#ifndef MHT_SRC_WORKERS_H_
#define MHT_SRC_WORKERS_H_

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace mht {

// More than any copy scales to.
constexpr int64_t kMaxThreads = 64;

// Threads made meanwhile handle no signal: Python's are for its main thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

template <class Work>
struct Shared {
  const Work& work;
  const int64_t pieces;
  std::atomic<int64_t> next{0};

  static void* take(void* shared) {
    Shared& self = *static_cast<Shared*>(shared);
    for (int64_t i = self.next.fetch_add(1); i < self.pieces; i = self.next.fetch_add(1)) self.work(i);
    return nullptr;
  }
};

// Calls work(i) once for every i < pieces; `work` must not throw. Where the system gives no more threads, fewer do it.
template <class Work>
void share(int64_t pieces, int64_t threads, const Work& work) {
  Shared<Work> shared{work, pieces};
  std::array<pthread_t, kMaxThreads> helpers;
  size_t made = 0;
  // The caller has done a piece before a helper has started, so two each.
  const int64_t wanted = std::min({threads, kMaxThreads, pieces / 2}) - 1;
  if (wanted > 0) {
    const SignalsBlocked blocked;
    const size_t helping = static_cast<size_t>(wanted);
    while (made < helping && pthread_create(&helpers[made], nullptr, Shared<Work>::take, &shared) == 0) ++made;
  }
  Shared<Work>::take(&shared);
  for (size_t i = 0; i < made; ++i) pthread_join(helpers[i], nullptr);
}

}  // namespace mht

#endif  // MHT_SRC_WORKERS_H_
