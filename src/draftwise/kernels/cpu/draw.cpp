// Drawing one of many tokens: what sampling.py does by `_arrivals`, in a single pass over the weights or the logits.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "simd.h"

using namespace dw;

namespace {

constexpr int kBlock = 256;

// Output number `id` of SplitMix64 when seeded with `key`.
inline uint64_t hashed(uint64_t key, uint64_t id) {
  uint64_t z = key + (id + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// The earliest arrival so far; equal times go to the lowest token.
class First {
 public:
  explicit First(uint64_t key) : key_(key) {}

  // At most kBlock tokens; token(i) is the one that weight[i] is of.
  template <class Token>
  void meet(const float* weight, int size, Token token) {
    uint64_t z[kBlock];
    float bound[kBlock];
    for (int i = 0; i < size; ++i) z[i] = hashed(key_, uint64_t(token(i)));
    // with u = 1 - w, the time -log(u) / weight is at least w / weight; the upper bits of w do not exceed it
    for (int i = 0; i < size; ++i) bound[i] = float(int32_t(z[i] >> 40)) * 0x1p-24f / weight[i];
    int near = 0;
    for (int i = 0; i < size; ++i) near += bound[i] <= latest_;
    if (!near) return;
    for (int i = 0; i < size; ++i) {
      if (!(bound[i] <= latest_ && weight[i] > 0)) continue;
      const double w = (double(z[i] >> 12) + 0.5) * 0x1p-52;
      const double time = -std::log1p(-w) / double(weight[i]);
      if (time < time_ || (time == time_ && token(i) < token_)) {
        time_ = time, token_ = token(i);
        latest_ = float(time) * (1 + 1e-6f);
      }
    }
  }

  int64_t token() const { return token_; }

 private:
  uint64_t key_;
  double time_ = std::numeric_limits<double>::infinity();
  int64_t token_ = -1;
  float latest_ = std::numeric_limits<float>::infinity();  // no later than this may a time's lower bound be
};

}  // namespace

// `tokens`: what the weights are of; null for 0 .. count - 1. -1 where nothing weighs.
extern "C" int64_t draftwise_first_arrival(const float* weights, const int64_t* tokens, int64_t count, uint64_t key) {
  First first(key);
  for (int64_t start = 0; start < count; start += kBlock) {
    const int size = int(std::min<int64_t>(kBlock, count - start));
    if (tokens)
      first.meet(weights + start, size, [=](int i) { return tokens[start + i]; });
    else
      first.meet(weights + start, size, [=](int i) { return start + i; });
  }
  return first.token();
}

// From logits: the largest at temperature 0, else the first arrival by weights exp((logit - largest) / temperature).
// -1 where that has no meaning: a NaN, an infinity, nothing above minus infinity.
extern "C" int64_t draftwise_draw(const float* logits, int64_t count, float temperature, uint64_t key) {
  int strange = 0;
  for (int64_t i = 0; i < count; ++i) strange |= !(logits[i] <= FLT_MAX);
  if (strange) return -1;
  const int64_t whole = count / 16 * 16;
  F highest = splat(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < whole; i += 16) highest = max(highest, load(logits + i));
  float top = largest(highest);
  for (int64_t i = whole; i < count; ++i) top = std::max(top, logits[i]);
  if (!(top >= -FLT_MAX)) return -1;
  if (temperature == 0) return std::find(logits, logits + count, top) - logits;

  First first(key);
  for (int64_t start = 0; start < count; start += kBlock) {
    const int size = int(std::min<int64_t>(kBlock, count - start));
    float weight[kBlock];
    std::copy(logits + start, logits + start + size, weight);
    std::fill(weight + size, weight + kBlock, top);
    for (int i = 0; i < size; i += 16) store(weight + i, exp((load(weight + i) - splat(top)) / splat(temperature)));
    first.meet(weight, size, [=](int i) { return start + i; });
  }
  return first.token();
}
