// Drawing one of many tokens: what sampling.py does by `_arrivals`, in a single pass over the weights or the logits.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"

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

// The earliest arrivals so far, in order; of equal times the lowest token is first.
class Arrivals {
 public:
  // `times` and `tokens` have room for `most`.
  Arrivals(uint64_t key, int64_t most, double* times, int64_t* tokens)
      : key_(key), most_(most), times_(times), tokens_(tokens) {}

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
      take(-std::log1p(-w) / double(weight[i]), token(i));
    }
  }

  void take(double time, int64_t token) {
    const auto before = [&](int64_t i) { return times_[i] < time || (times_[i] == time && tokens_[i] < token); };
    if (count_ == most_ && before(most_ - 1)) return;
    int64_t at = std::min(count_, most_ - 1);
    for (; at > 0 && !before(at - 1); --at) times_[at] = times_[at - 1], tokens_[at] = tokens_[at - 1];
    times_[at] = time, tokens_[at] = token;
    count_ = std::min(count_ + 1, most_);
    if (count_ == most_) latest_ = float(times_[most_ - 1]) * (1 + 1e-6f);
  }

  int64_t count() const { return count_; }

 private:
  uint64_t key_;
  int64_t most_, count_ = 0;
  double* times_;
  int64_t* tokens_;
  float latest_ = std::numeric_limits<float>::infinity();  // no later than this may a time's lower bound be
};

// The largest of some logits, and the block it is in, the first of equal ones; a NaN where that has no meaning: among them a NaN,
// an infinity, or nothing above minus infinity.
struct Peak {
  float top = -std::numeric_limits<float>::infinity();
  int64_t block = 0;

  void meet(const Peak& later) {
    if (top == top && !(later.top <= top)) *this = later;
  }
  bool means() const { return top >= -FLT_MAX && top <= FLT_MAX; }
};

float highest_of(const float* logits, int size) {
  int strange = 0;
  for (int i = 0; i < size; ++i) strange |= !(logits[i] <= FLT_MAX);
  if (strange) return std::numeric_limits<float>::quiet_NaN();
  if (size < kBlock) return *std::max_element(logits, logits + size);
  F most[4] = {load(logits), load(logits + 16), load(logits + 32), load(logits + 48)};
  for (int i = 64; i < kBlock; i += 64)
    for (int k = 0; k < 4; ++k) most[k] = max(most[k], load(logits + i + 16 * k));
  return largest(max(max(most[0], most[1]), max(most[2], most[3])));
}

// Of the logits from `begin`, where a block begins, to `end`.
Peak peak(const float* logits, int64_t begin, int64_t end) {
  Peak found;
  for (int64_t start = begin; start < end; start += kBlock) {
    const float top = highest_of(logits + start, int(std::min<int64_t>(kBlock, end - start)));
    if (!(top == top)) return {top, start};
    found.meet({top, start});
  }
  return found;
}

float highest(const float* logits, int64_t count) {
  const Peak found = peak(logits, 0, count);
  return found.means() ? found.top : std::numeric_limits<float>::quiet_NaN();
}

// A row's logits in parts of whole blocks, one a thread: each looks at about what it wrote when the logits were made.
struct Parts {
  static constexpr int kMost = 64;
  static constexpr int64_t kLeast = 8192;  // logits that are worth a thread
  int64_t count;
  int parts;

  explicit Parts(int64_t size)
      : count(size), parts(int(std::clamp<int64_t>(size / kLeast, 1, std::min(draftwise_threads(), kMost)))) {}
  int64_t begin(int part) const { return part == parts ? count : count * part / parts / kBlock * kBlock; }
};

// True where all weights of a whole block are 0, as those of tokens are that a draft does not know.
bool hopeless(const float* logits, float top, float temperature) {
  F most = load(logits);
  for (int i = 16; i < kBlock; i += 16) most = max(most, load(logits + i));
  return (largest(most) - top) / temperature < -88.0f;
}

// weight[i] = exp((logits[i] - top) / temperature) for a whole block; above `size` they are those of `top`.
void weigh(const float* logits, int size, float top, float temperature, float* weight) {
  std::copy(logits, logits + size, weight);
  std::fill(weight + size, weight + kBlock, top);
  for (int i = 0; i < size; i += 16) store(weight + i, exp((load(weight + i) - splat(top)) / splat(temperature)));
}

}  // namespace

// The first arrivals, `most` of them at most, and how many there are. `tokens`: what the weights are of; null for
// 0 .. count - 1.
extern "C" int64_t draftwise_arrivals(const float* weights, const int64_t* tokens, int64_t count, uint64_t key, int64_t most,
                                      double* times, int64_t* found) {
  Arrivals arrivals(key, most, times, found);
  for (int64_t start = 0; start < count; start += kBlock) {
    const int size = int(std::min<int64_t>(kBlock, count - start));
    if (tokens)
      arrivals.meet(weights + start, size, [=](int i) { return tokens[start + i]; });
    else
      arrivals.meet(weights + start, size, [=](int i) { return start + i; });
  }
  return arrivals.count();
}

// The same by weights exp((logit - largest) / temperature), at temperature 0 the largest alone. -1 where that has no meaning.
extern "C" int64_t draftwise_draw(const float* logits, const int64_t* tokens, int64_t count, float temperature, uint64_t key,
                                  int64_t most, double* times, int64_t* found) {
  const Parts parts(count);
  const auto token = [=](int64_t i) { return tokens ? tokens[i] : i; };
  Peak peaks[Parts::kMost];
  const auto whole = [&] {
    Peak all;
    for (int part = 0; part < parts.parts; ++part) all.meet(peaks[part]);
    return all;
  };
  std::vector<double> part_times(parts.parts * most);
  std::vector<int64_t> part_found(parts.parts * most), held(parts.parts);
  Stages stages(2, parts.parts);
  fork(parts.parts, [&](int thread) {
    stages.run(0, thread, parts.parts, [&](int part) { peaks[part] = peak(logits, parts.begin(part), parts.begin(part + 1)); });
    const Peak all = whole();
    if (temperature == 0 || !all.means()) return;
    stages.run(1, thread, parts.parts, [&](int part) {
      Arrivals arrivals(key, most, &part_times[part * most], &part_found[part * most]);
      float weight[kBlock];
      for (int64_t start = parts.begin(part); start < parts.begin(part + 1); start += kBlock) {
        const int size = int(std::min<int64_t>(kBlock, parts.begin(part + 1) - start));
        if (size == kBlock && hopeless(logits + start, all.top, temperature)) continue;
        weigh(logits + start, size, all.top, temperature, weight);
        arrivals.meet(weight, size, [=](int i) { return token(start + i); });
      }
      held[part] = arrivals.count();
    });
  });
  const Peak all = whole();
  if (!all.means()) return -1;
  if (temperature == 0) {
    times[0] = 0, found[0] = token(std::find(logits + all.block, logits + count, all.top) - logits);
    return 1;
  }
  Arrivals arrivals(key, most, times, found);
  for (int part = 0; part < parts.parts; ++part)
    for (int64_t i = part * most; i < part * most + held[part]; ++i) arrivals.take(part_times[i], part_found[i]);
  return arrivals.count();
}

// Per row the `most` largest logits, largest first, of equal ones the lowest first; `most` is at most `count`. mass[row]: the
// sum of exp(logit - largest) over the row, unless mass is null. Returns 0 where a row has no meaning.
extern "C" int64_t draftwise_largest(const float* logits, int64_t rows, int64_t count, int64_t most, float* values,
                                     int64_t* found, double* mass) {
  for (int64_t row = 0; row < rows; ++row, logits += count, values += most, found += most) {
    const float top = highest(logits, count);
    if (!(top == top)) return 0;
    int64_t held = 0;
    float weight[kBlock];
    double mass_of_row = 0;
    for (int64_t start = 0; start < count; start += kBlock) {
      const int size = int(std::min<int64_t>(kBlock, count - start));
      if (mass && (size < kBlock || !hopeless(logits + start, top, 1.0f))) {
        weigh(logits + start, size, top, 1.0f, weight);
        std::fill(weight + size, weight + kBlock, 0.0f);
        F part = zero();
        for (int i = 0; i < kBlock; i += 16) part = part + load(weight + i);
        mass_of_row += sum(part);
      }
      const float least = held == most ? values[most - 1] : -std::numeric_limits<float>::infinity();
      int near = held < most;
      for (int i = 0; i < size; ++i) near |= logits[start + i] > least;
      if (!near) continue;
      for (int i = 0; i < size; ++i) {
        const float value = logits[start + i];
        if (held == most && !(value > values[most - 1])) continue;
        int64_t at = std::min(held, most - 1);
        for (; at > 0 && values[at - 1] < value; --at) values[at] = values[at - 1], found[at] = found[at - 1];
        values[at] = value, found[at] = start + i;
        held = std::min(held + 1, most);
      }
    }
    if (mass) mass[row] = mass_of_row;
  }
  return 1;
}
