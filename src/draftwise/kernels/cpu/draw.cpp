// The first arrival among many tokens: sampling.py's `_arrivals` for one of them, in a single pass over the weights.

#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int kBlock = 256;

// Output number `id` of SplitMix64 when seeded with `key`.
inline uint64_t hashed(uint64_t key, uint64_t id) {
  uint64_t z = key + (id + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

}  // namespace

// `tokens`: what the weights are of; null for 0 .. count - 1. Equal times go to the lowest token; -1 where nothing weighs.
extern "C" int64_t draftwise_first_arrival(const float* weights, const int64_t* tokens, int64_t count, uint64_t key) {
  double first = std::numeric_limits<double>::infinity();
  int64_t found = -1;
  float latest = std::numeric_limits<float>::infinity();  // no later than this may a time's lower bound be
  for (int64_t start = 0; start < count; start += kBlock) {
    const int size = int(count - start < kBlock ? count - start : kBlock);
    const float* weight = weights + start;
    uint64_t z[kBlock];
    float bound[kBlock];
    if (tokens)
      for (int i = 0; i < size; ++i) z[i] = hashed(key, uint64_t(tokens[start + i]));
    else
      for (int i = 0; i < size; ++i) z[i] = hashed(key, uint64_t(start + i));
    // with u = 1 - w, the time -log(u) / weight is at least w / weight; the upper bits of w do not exceed it
    for (int i = 0; i < size; ++i) bound[i] = float(int32_t(z[i] >> 40)) * 0x1p-24f / weight[i];
    int near = 0;
    for (int i = 0; i < size; ++i) near += bound[i] <= latest;
    if (!near) continue;
    for (int i = 0; i < size; ++i) {
      if (!(bound[i] <= latest && weight[i] > 0)) continue;
      const double w = (double(z[i] >> 12) + 0.5) * 0x1p-52;
      const double time = -std::log1p(-w) / double(weight[i]);
      const int64_t token = tokens ? tokens[start + i] : start + i;
      if (time < first || (time == first && token < found)) {
        first = time, found = token;
        latest = float(time) * (1 + 1e-6f);
      }
    }
  }
  return found;
}
