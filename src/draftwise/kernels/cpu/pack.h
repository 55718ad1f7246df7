// From integers, scales and minima to tiles, and back. Nothing is rounded.
#pragma once

#include <numeric>
#include <vector>

#include "team.h"
#include "weights.h"

namespace dw {

// |x| = odd_or_even * 2^power, exactly.
struct Parts {
  int64_t whole;
  int power;
};
inline Parts parts(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const int exponent = u >> 23 & 255;
  return {int64_t(u & 0x7fffff) | (exponent ? 0x800000 : 0), (exponent ? exponent : 1) - 150};
}

inline bool fits_half(float x) {
  if (x == 0) return true;
  const Parts p = parts(x);
  const int zeros = __builtin_ctzll(p.whole), top = 63 - __builtin_clzll(p.whole);
  return p.power + zeros >= -24 && top - zeros <= 10 && p.power + top <= 15;
}
inline uint16_t to_half(float x) {  // of a float that fits
  const float size = std::fabs(x);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (size < 0x1p-14f) return sign | uint16_t(size * 0x1p24f);
  const int exponent = std::ilogb(size);
  return sign | uint16_t((exponent + 15) << 10) | uint16_t(std::ldexp(size, 10 - exponent) - 1024.0f);
}

// The largest unit of which every value is a multiple from -128 to 127, negative where that takes it; 0: there is none.
inline float common_unit(const float* values, int64_t count) {
  int64_t divisor = 0;
  int lowest = 1000;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] == 0) continue;
    Parts p = parts(values[i]);
    const int zeros = __builtin_ctzll(p.whole);
    p.whole >>= zeros;
    lowest = std::min(lowest, p.power + zeros);
    divisor = divisor == 0 || divisor % p.whole == 0 ? p.whole : p.whole % divisor ? std::gcd(divisor, p.whole) : divisor;
  }
  if (divisor == 0) return 1.0f;
  float unit = std::ldexp(float(divisor), lowest);
  double least = 0, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, double(values[i]) / unit);
    most = std::max(most, double(values[i]) / unit);
  }
  if (most > 127) {
    unit = -unit;
    std::swap(least, most);
    least = -least, most = -most;
  }
  return least >= -128 && most <= 127 ? unit : 0.0f;
}

struct Source {  // row-major, as read from a checkpoint
  const int8_t* values;     // [out, in]
  const float* scales;      // [out, groups]; null for dense weights
  const float* minima;      // [out, groups] or null
  const float* dense;       // [out, in] for kFp32, else null
  const uint16_t* dense16;  // [out, in] for kBf16, else null
};

// Work for `items` in parallel; true when f was true for all.
template <class Function>
bool all_of(int64_t items, Function f) {
  std::atomic<bool> good{true};
  const int threads = draftwise_threads();
  Stages stages(1, threads);
  const int pieces = int(std::min<int64_t>(items, 64));
  fork(threads, [&](int thread) {
    stages.run(0, thread, pieces, [&](int piece) {
      for (int64_t i = items * piece / pieces; i < items * (piece + 1) / pieces && good.load(std::memory_order_relaxed); ++i)
        if (!f(i)) good.store(false, std::memory_order_relaxed);
    });
  });
  return good.load();
}

inline int64_t groups_of(const Weights& w) { return w.group ? (w.in + w.group - 1) / w.group : 0; }

// Choose kind, zero and scale for w (out, in and group are given) and how long a tile is.
inline void plan(Weights& w, const Source& source) {
  if (source.dense || source.dense16) {
    w.kind = source.dense ? kFp32 : kBf16;
    w.scale = kNoScale;
    w.has_minimum = w.zero = w.group = 0;
  } else {
    const int64_t count = int64_t(w.out) * w.in, scales = int64_t(w.out) * groups_of(w);
    int low = 127, high = -128;
    for (int64_t i = 0; i < count; ++i) {
      low = std::min<int>(low, source.values[i]);
      high = std::max<int>(high, source.values[i]);
    }
    // a minimum that is the same multiple of every scale is a shift of the integers
    int shift = 0;
    w.has_minimum = w.group && source.minima != nullptr;
    if (w.has_minimum) {
      int64_t some = 0;
      while (some < scales && source.scales[some] == 0) ++some;
      const float ratio = some < scales ? -source.minima[some] / source.scales[some] : 0.0f;
      if (ratio == std::rint(ratio) && low - ratio >= -128 && high - ratio <= 127 &&
          all_of(scales, [&](int64_t i) { return source.minima[i] == -ratio * source.scales[i]; })) {
        shift = int(ratio);
        w.has_minimum = 0;
      }
    }
    w.kind = high - low <= 15 ? kInt4 : high - low <= 63 ? kInt6 : kInt8;
    const int top = w.kind == kInt4 ? 15 : 63, middle = -(top + 1) / 2;
    if (w.kind == kInt8)
      w.base = shift;  // codes are the signed integers themselves
    else
      w.base = low >= 0 && high <= top ? 0 : low >= middle && high <= middle + top ? middle : low;
    w.zero = shift - w.base;
    w.scale = kNoScale;
    if (w.group) {
      const int64_t groups = groups_of(w), slab = kSlabUnits * kUnit / w.group;
      const auto halves = [&](const float* values) { return all_of(scales, [&](int64_t i) { return fits_half(values[i]); }); };
      const auto levels = [&](const float* values) {
        return all_of(w.out, [&](int64_t row) {
          for (int64_t g = 0; g < groups; g += slab)
            if (common_unit(values + row * groups + g, std::min(slab, groups - g)) == 0) return false;
          return true;
        });
      };
      const float* minima = w.has_minimum ? source.minima : nullptr;
      w.scale = halves(source.scales) && (!minima || halves(minima))   ? kHalf
                : levels(source.scales) && (!minima || levels(minima)) ? kTwoLevel
                                                                       : kFloat;
    }
    for (int i = 0; i < 64; ++i) w.lookup[i] = to_bf16(float((w.kind == kInt4 ? i % 16 : i) - w.zero));
  }
  w.tile_bytes = 0;
  for (int first = 0; first < w.units(); first += kSlabUnits) {
    const int units = std::min(kSlabUnits, w.units() - first);
    w.tile_bytes += Layout::of(w, units).bytes + units * unit_bytes(w.kind);
  }
}

// The code of input k of lane j in a unit.
inline void put_code(int kind, uint8_t* unit, int j, int k, uint32_t code) {
  uint16_t* halves = (uint16_t*)unit;  // half h of word i, lane j, is at 2 * (16 * i + j) + h
  const int p = k / 2, h = k % 2;
  const auto word = [&](int i) -> uint16_t& { return halves[2 * (16 * i + j) + h]; };
  if (kind == kInt4) {
    word(p / 4) |= uint16_t(code << (4 * (p % 4)));
  } else if (kind == kInt6) {
    if (p < 6) {
      word(p / 2) |= uint16_t(code << (6 * (p % 2)));
    } else {
      word(p == 6 ? 0 : 2) |= uint16_t((code & 15) << 12);
      word(1) |= uint16_t((code >> 4) << (p == 6 ? 12 : 14));
    }
  } else if (kind == kInt8) {
    word(p / 2) |= uint16_t((code & 255) << (8 * (p % 2)));
  } else {
    word(p) = uint16_t(code);
  }
}
inline uint32_t get_code(int kind, const uint8_t* unit, int j, int k) {
  const uint16_t* halves = (const uint16_t*)unit;
  const int p = k / 2, h = k % 2;
  const auto word = [&](int i) -> uint32_t { return halves[2 * (16 * i + j) + h]; };
  if (kind == kInt4) return word(p / 4) >> (4 * (p % 4)) & 15;
  if (kind == kInt6) {
    if (p < 6) return word(p / 2) >> (6 * (p % 2)) & 63;
    return word(p == 6 ? 0 : 2) >> 12 | (word(1) >> (p == 6 ? 12 : 14) & 3) << 4;
  }
  if (kind == kInt8) return word(p / 2) >> (8 * (p % 2)) & 255;
  return word(p);
}

// Lay the weights out in data: tiles() * tile_bytes bytes.
inline void fill(const Weights& w, const Source& source, uint8_t* data) {
  const int64_t groups = groups_of(w);
  all_of(w.tiles(), [&](int64_t tile) {
    uint8_t* slab = data + tile * w.tile_bytes;
    std::memset(slab, 0, w.tile_bytes);
    for (int first = 0; first < w.units(); first += kSlabUnits) {
      const int units = std::min(kSlabUnits, w.units() - first);
      const Layout layout = Layout::of(w, units);
      for (int j = 0; j < 16 && tile * 16 + j < w.out; ++j) {
        const int64_t row = tile * 16 + j;
        const auto put_scales = [&](const float* values, int set) {
          const float* from = values + row * groups + int64_t(first) * kUnit / w.group;
          const float unit = w.scale == kTwoLevel ? common_unit(from, layout.groups) : 0.0f;
          if (w.scale == kTwoLevel) ((float*)slab)[16 * set + j] = unit;
          for (int g = 0; g < layout.groups; ++g) {
            uint8_t* at = slab + layout.first + g * layout.stride + set * layout.minimum;
            if (w.scale == kHalf) ((uint16_t*)at)[j] = to_half(from[g]);
            if (w.scale == kTwoLevel) ((int8_t*)at)[j] = int8_t(std::lrint(double(from[g]) / unit));
            if (w.scale == kFloat) ((float*)at)[j] = from[g];
          }
        };
        if (w.group) put_scales(source.scales, 0);
        if (w.group && w.has_minimum) put_scales(source.minima, 1);
        for (int u = 0; u < units; ++u) {
          uint8_t* unit = slab + layout.bytes + u * unit_bytes(w.kind);
          for (int k = 0; k < kUnit && (first + u) * kUnit + k < w.in; ++k) {
            const int64_t at = row * w.in + (first + u) * kUnit + k;
            if (w.kind == kFp32)
              ((float*)unit)[16 * k + j] = source.dense[at];
            else if (w.kind == kBf16)
              put_code(kBf16, unit, j, k, source.dense16[at]);
            else
              put_code(w.kind, unit, j, k, uint32_t(source.values[at] - w.base));
          }
        }
      }
      slab += layout.bytes + units * unit_bytes(w.kind);
    }
    return true;
  });
}

// One output's weights as floats.
inline void unpack_row(const Weights& w, int64_t row, float* to) {
  const int j = int(row % 16);
  const uint8_t* slab = w.data + row / 16 * w.tile_bytes;
  for (int first = 0; first < w.units(); first += kSlabUnits) {
    const int units = std::min(kSlabUnits, w.units() - first);
    const Layout layout = Layout::of(w, units);
    float scale[16], minimum[16] = {};
    for (int u = 0; u < units; ++u) {
      const uint8_t* unit = slab + layout.bytes + u * unit_bytes(w.kind);
      if (w.group && u * kUnit % w.group == 0) {
        const GroupScale s = load_scale(w, layout, slab, u * kUnit / w.group);
        store(scale, s.scale);
        if (w.has_minimum) store(minimum, s.minimum);
      }
      for (int k = 0; k < kUnit && (first + u) * kUnit + k < w.in; ++k) {
        float value;
        if (w.kind == kFp32) {
          value = ((const float*)unit)[16 * k + j];
        } else {
          const uint32_t code = get_code(w.kind, unit, j, k);
          value = w.kind == kBf16 ? from_bf16(uint16_t(code)) : w.kind == kInt8 ? float(int8_t(code)) : float(int(code) - w.zero);
        }
        if (w.group)
          value = value * scale[j] + minimum[j];
        else if (w.row_scale)
          value = value * w.row_scale[row] + (w.row_minimum ? w.row_minimum[row] : 0.0f);
        to[(first + u) * kUnit + k] = value;
      }
    }
    slab += layout.bytes + units * unit_bytes(w.kind);
  }
}

}  // namespace dw
