// How weights lie in memory, and how sixteen of them become a vector.
//
// A weight is (code - zero) * scale + minimum; a code is the checkpoint's integer less `base`. A tile holds 16 outputs, one per lane, and is read from front to back:
//
//   tile = slab, slab, ...            a slab covers 256 inputs, the last one perhaps fewer
//   slab = scales of its groups, padded to 64 bytes, then its units
//   unit = the codes of 16 inputs as 8 pairs; pair p of lane j is inputs 2p (low half) and 2p + 1 (high half) of output j
//
// Scales keep every bit they came with, in the smallest form that does: half precision, or a float for the slab times a
// byte for the group (K-quants), or floats.
#pragma once

#include "simd.h"

namespace dw {

constexpr int kUnit = 16;       // inputs
constexpr int kSlabUnits = 16;  // units

enum Kind : int32_t { kInt4, kInt6, kInt8, kBf16, kFp32, kCodes };  // kCodes: expanded to bytes, in no checkpoint
enum Scale : int32_t { kNoScale, kHalf, kTwoLevel, kFloat };

struct Weights {
  const uint8_t* data;
  const float* row_scale;  // one per output, padded to whole tiles; null: 1. For weights without groups only
  const float* row_minimum;
  const float* bias;  // null: none
  int64_t tile_bytes;
  int32_t out, in;
  int32_t kind, scale;
  int32_t group;  // inputs per scale: 16, 32, or 0 for none or one a row
  int32_t has_minimum;
  int32_t base, zero;
  int32_t as_bytes;  // multiply bytes, where the machine can and activations are not floats
  uint16_t lookup[64];  // code -> bfloat16 of (code - zero), for four and six bits

  int units() const { return (in + kUnit - 1) / kUnit; }
  int tiles() const { return (out + 15) / 16; }
};

constexpr int unit_bytes(int kind) {
  return kind == kInt4 ? 128 : kind == kInt6 ? 192 : kind == kInt8 || kind == kCodes ? 256 : kind == kBf16 ? 512 : 1024;
}

struct Layout {  // of a slab's scales
  int groups, stride, minimum, first;  // stride: bytes per group; minimum: offset inside it; first: offset of the first group
  int bytes;

  static Layout of(const Weights& w, int units) {
    if (!w.group) return {0, 0, 0, 0, 0};
    const int size = w.scale == kHalf ? 32 : w.scale == kTwoLevel ? 16 : 64;
    const int sets = w.has_minimum ? 2 : 1;
    const int groups = (units * kUnit + w.group - 1) / w.group;
    const int first = w.scale == kTwoLevel ? 64 * sets : 0;
    return {groups, size * sets, size, first, (first + groups * size * sets + 63) / 64 * 64};
  }
};

// The scale and minimum of one group, per lane.
struct GroupScale {
  F scale, minimum;
};

DW_INLINE GroupScale load_scale(const Weights& w, const Layout& layout, const uint8_t* slab, int group) {
  const uint8_t* at = slab + layout.first + group * layout.stride;
  GroupScale g;
  if (w.scale == kHalf) {
    g.scale = load_f16((const uint16_t*)at);
    if (w.has_minimum) g.minimum = load_f16((const uint16_t*)(at + layout.minimum));
  } else if (w.scale == kTwoLevel) {
    g.scale = load_i8((const int8_t*)at) * load((const float*)slab);
    if (w.has_minimum) g.minimum = load_i8((const int8_t*)(at + layout.minimum)) * load((const float*)slab + 16);
  } else {
    g.scale = load((const float*)at);
    if (w.has_minimum) g.minimum = load((const float*)(at + layout.minimum));
  }
  return g;
}

// Pair P's codes in the low bits of each half; what lies above them is noise.
template <int K, int P>
DW_INLINE U codes(const uint8_t* unit) {
  const uint32_t* words = (const uint32_t*)unit;
  if constexpr (K == kInt4) {
    const U raw = load(words + P / 4 * 16);
    return P % 4 ? raw >> (4 * (P % 4)) : raw;
  } else if constexpr (K == kInt6) {
    if constexpr (P < 6) {
      const U raw = load(words + P / 2 * 16);
      return P % 2 ? raw >> 6 : raw;
    } else if constexpr (P == 6) {  // four bits of the first word's top, two of the second's
      const U low = (load(words) >> 12) & splat(0x000f000fu);
      return low | ((load(words + 16) >> 8) & splat(0x00300030u));
    } else {
      const U low = (load(words + 32) >> 12) & splat(0x000f000fu);
      return low | ((load(words + 16) >> 10) & splat(0x00300030u));
    }
  } else if constexpr (K == kInt8) {
    const U raw = load(words + P / 2 * 16);
    return P % 2 ? raw >> 8 : raw;
  } else {
    return load(words + P * 16);
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
// Where each byte of four codes of `bits` bits begins in a word whose halves hold them from bit `first` on, for `fields`.
constexpr uint64_t fields_at(int first, int bits) {
  uint64_t at = 0;
  for (int byte = 0; byte < 8; ++byte) at |= uint64_t(first + byte / 2 * 16 + byte % 2 * bits) << (8 * byte);
  return at;
}
DW_INLINE U splat64(uint64_t x) {
  U a;
  a.part[0] = (NativeU)_mm512_set1_epi64(int64_t(x));
  return a;
}

// The codes of inputs 4Q, 4Q + 2, 4Q + 1, 4Q + 3 as bytes without sign; those of eight bits are 128 more than they were.
template <int K, int Q>
DW_INLINE U quad(const uint8_t* unit) {
  const uint32_t* words = (const uint32_t*)unit;
  if constexpr (K == kInt4) {
    return fields(splat64(fields_at(8 * (Q % 2), 4)), load(words + Q / 2 * 16)) & splat(0x0f0f0f0fu);
  } else if constexpr (K == kInt6) {
    if constexpr (Q < 3)
      return fields(splat64(fields_at(0, 6)), load(words + Q * 16)) & splat(0x3f3f3f3fu);
    else
      return codes<K, 6>(unit) | codes<K, 7>(unit) << 8;
  } else if constexpr (K == kInt8) {
    return load(words + Q * 16) ^ splat(0x80808080u);
  } else {
    return load(words + Q * 16);
  }
}
#endif

// Low and high byte of the bfloat16 of 0 .. 127.
struct ByteTables {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr ByteTables() {
    for (int v = 1; v < 128; ++v) {
      int top = 0;
      while (v >> (top + 1)) ++top;
      const int half = (127 + top) << 7 | (v << (7 - top) & 127);
      low[v] = uint8_t(half & 255);
      high[v] = uint8_t(half >> 8);
    }
  }
};
inline constexpr ByteTables kBytes;

// Tables for turning codes into bfloat16, kept in registers across a tile.
template <int K>
struct Lookup {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  __m512i a, b, c, d;

  explicit Lookup(const Weights& w) {
    if constexpr (K == kInt4) {
      a = _mm512_loadu_si512(w.lookup);  // 16 entries, twice
    } else if constexpr (K == kInt6) {
      a = _mm512_loadu_si512(w.lookup);
      b = _mm512_loadu_si512(w.lookup + 32);
    } else if constexpr (K == kInt8) {
      a = _mm512_load_si512(kBytes.low);
      b = _mm512_load_si512(kBytes.low + 64);
      c = _mm512_load_si512(kBytes.high);
      d = _mm512_load_si512(kBytes.high + 64);
    }
  }

  template <int P>
  DW_INLINE U pair(const uint8_t* unit) const {
    U out;
    if constexpr (K == kInt4) {
      out.part[0] = (NativeU)_mm512_permutexvar_epi16((__m512i)codes<K, P>(unit).part[0], a);
    } else if constexpr (K == kInt6) {
      out.part[0] = (NativeU)_mm512_permutex2var_epi16(a, (__m512i)codes<K, P>(unit).part[0], b);
    } else if constexpr (K == kInt8) {
      const __m512i raw = (__m512i)load((const uint32_t*)unit + P / 2 * 16).part[0];
      const __m512i size = _mm512_abs_epi8(raw);
      const __m512i low = _mm512_permutex2var_epi8(a, size, b);
      __m512i high = _mm512_permutex2var_epi8(c, size, d);
      high = _mm512_ternarylogic_epi32(high, raw, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (raw & sign)
      // -128 has no positive twin to look up
      high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(size), _mm512_set1_epi8(char(0xc3)));
      const __m512i byte = _mm512_set1_epi16(0x00ff);
      if constexpr (P % 2 == 0)
        out.part[0] = (NativeU)_mm512_ternarylogic_epi32(byte, low, _mm512_slli_epi16(high, 8), 0xea);
      else
        out.part[0] = (NativeU)_mm512_ternarylogic_epi32(byte, high, _mm512_srli_epi16(low, 8), 0xae);
    } else {
      out = codes<K, P>(unit);
    }
    return out;
  }
#else
  explicit Lookup(const Weights&) {}
#endif
};

// Pair P as floats: the even inputs, then the odd ones.
template <int K, int P>
DW_INLINE void pair_floats(const uint8_t* unit, float zero, F& even, F& odd) {
  if constexpr (K == kFp32) {
    even = load((const float*)unit + 32 * P);
    odd = load((const float*)unit + 32 * P + 16);
  } else {
    const U c = codes<K, P>(unit);
    if constexpr (K == kBf16) {
      even = floats(c << 16);
      odd = floats(c & splat(0xffff0000u));
    } else if constexpr (K == kInt8) {
      even = convert(shift_right_signed(c << 24, 24));
      odd = convert(shift_right_signed(c << 8, 24));
    } else {
      const U mask = splat(K == kInt4 ? 15u : 63u);
      even = convert(c & mask) - splat(zero);
      odd = convert(c >> 16 & mask) - splat(zero);
    }
  }
}

}  // namespace dw
