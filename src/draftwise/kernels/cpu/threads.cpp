// The one file that includes torch: work runs on torch's own threads.
#include <ATen/Parallel.h>

extern "C" void draftwise_fork(void (*body)(void*, int), void* context, int threads) {
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) body(context, static_cast<int>(thread));
  });
}

extern "C" int draftwise_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }
