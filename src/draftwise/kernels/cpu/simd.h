// Sixteen lanes of float or of 32-bit integers, whatever the machine's registers are.
//
// Knows instructions; knows nothing of weights or models. Every operation rounds the same way wherever it is used, so a
// row's result does not depend on which template computed it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define DW_INLINE inline __attribute__((always_inline))
#define DW_INLINE_LAMBDA __attribute__((always_inline))

namespace dw {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = 16 / kLanes;

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif

typedef float NativeF __attribute__((vector_size(kLanes * 4)));
typedef int32_t NativeI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t NativeU __attribute__((vector_size(kLanes * 4)));

typedef NativeF LooseF __attribute__((aligned(1), may_alias));
typedef NativeU LooseU __attribute__((aligned(1), may_alias));

struct F {
  NativeF part[kParts];
};
struct U {
  NativeU part[kParts];
};

#define DW_EACH for (int i = 0; i < kParts; ++i)

DW_INLINE F operator+(F a, F b) { DW_EACH a.part[i] += b.part[i]; return a; }
DW_INLINE F operator-(F a, F b) { DW_EACH a.part[i] -= b.part[i]; return a; }
DW_INLINE F operator*(F a, F b) { DW_EACH a.part[i] *= b.part[i]; return a; }
DW_INLINE F operator/(F a, F b) { DW_EACH a.part[i] /= b.part[i]; return a; }
DW_INLINE U operator&(U a, U b) { DW_EACH a.part[i] &= b.part[i]; return a; }
DW_INLINE U operator|(U a, U b) { DW_EACH a.part[i] |= b.part[i]; return a; }
DW_INLINE U operator+(U a, U b) { DW_EACH a.part[i] += b.part[i]; return a; }
DW_INLINE U operator*(U a, U b) { DW_EACH a.part[i] *= b.part[i]; return a; }
DW_INLINE U operator^(U a, U b) { DW_EACH a.part[i] ^= b.part[i]; return a; }
DW_INLINE U operator>>(U a, int n) { DW_EACH a.part[i] >>= n; return a; }
DW_INLINE U operator<<(U a, int n) { DW_EACH a.part[i] <<= n; return a; }

DW_INLINE F splat(float x) { F a; DW_EACH a.part[i] = x - NativeF{}; return a; }
DW_INLINE U splat(uint32_t x) { U a; DW_EACH a.part[i] = x + NativeU{}; return a; }
DW_INLINE F zero() { F a; DW_EACH a.part[i] = NativeF{}; return a; }
DW_INLINE U bits(F a) { U b; DW_EACH b.part[i] = (NativeU)a.part[i]; return b; }
DW_INLINE F floats(U a) { F b; DW_EACH b.part[i] = (NativeF)a.part[i]; return b; }

DW_INLINE F load(const float* p) { F a; DW_EACH a.part[i] = ((const LooseF*)p)[i]; return a; }
DW_INLINE U load(const uint32_t* p) { U a; DW_EACH a.part[i] = ((const LooseU*)p)[i]; return a; }
DW_INLINE void store(float* p, F a) { DW_EACH ((LooseF*)p)[i] = a.part[i]; }
DW_INLINE void store(uint32_t* p, U a) { DW_EACH ((LooseU*)p)[i] = a.part[i]; }

// Signed integers to float.
DW_INLINE F convert(U a) {
  F b;
  DW_EACH b.part[i] = __builtin_convertvector((NativeI)a.part[i], NativeF);
  return b;
}
// Nearest integer, ties to even, for |a| < 2^22.
DW_INLINE F round_even(F a) {
  const F magic = splat(12582912.0f);
  return (a + magic) - magic;
}
DW_INLINE U shift_right_signed(U a, int n) {
  DW_EACH a.part[i] = (NativeU)((NativeI)a.part[i] >> n);
  return a;
}
DW_INLINE F max(F a, F b) { DW_EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i]; return a; }
DW_INLINE F min(F a, F b) { DW_EACH a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i]; return a; }

// a * b + c, fused where the machine can, rounded twice everywhere else (the build forbids contraction).
DW_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  c.part[0] = (NativeF)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
#elif defined(__AVX2__) && defined(__FMA__)
  DW_EACH c.part[i] = (NativeF)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#else
  DW_EACH c.part[i] += a.part[i] * b.part[i];
#endif
  return c;
}

// Fixed tree of additions: lanes 8 apart, then 4, 2, 1.
DW_INLINE float sum(F a) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_ps((__m512)a.part[0]);  // the same tree
#else
  float v[16];
  store(v, a);
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) v[i] += v[i + step];
  return v[0];
#endif
}
DW_INLINE float largest(F a) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps((__m512)a.part[0]);
#else
  float v[16];
  store(v, a);
  for (int step = 8; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) v[i] = v[i] > v[i + step] ? v[i] : v[i + step];
  return v[0];
#endif
}

// bfloat16

DW_INLINE float from_bf16(uint16_t h) {
  const uint32_t u = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
DW_INLINE uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
// Each lane's bfloat16 in its low half; NaN stays NaN.
DW_INLINE U to_bf16(F a) {
  const U u = bits(a);
  U rounded = (u + splat(0x7fffu) + (u >> 16 & splat(1u))) >> 16;
  const U quiet = u >> 16 | splat(0x40u);
  DW_EACH rounded.part[i] = a.part[i] == a.part[i] ? rounded.part[i] : quiet.part[i];
  return rounded;
}
DW_INLINE F load_bf16(const uint16_t* p) {
  F a;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  a.part[0] = (NativeF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  DW_EACH a.part[i] = (NativeF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + i)), 16);
#else
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = from_bf16(p[i]);
  a = load(v);
#endif
  return a;
}
DW_INLINE void store_bf16(uint16_t* p, F a) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)a.part[0]);  // rounds denormals to 0
  std::memcpy(p, &half, 32);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)to_bf16(a).part[0]));
#else
  uint32_t v[16];
  store(v, to_bf16(a));
  for (int i = 0; i < 16; ++i) p[i] = uint16_t(v[i]);
#endif
}

// Half precision and bytes, as scales are stored.

DW_INLINE U load_u16(const uint16_t* p) {
  U a;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  a.part[0] = (NativeU)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
  uint32_t v[16];
  for (int i = 0; i < 16; ++i) v[i] = p[i];
  a = load(v);
#endif
  return a;
}
DW_INLINE F load_f16(const uint16_t* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  F a;
  a.part[0] = (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  return a;
#else
  // exact for every finite half: place the exponent by a multiplication, then the sign
  const U h = load_u16(p);
  const F magnitude = floats((h & splat(0x7fffu)) << 13) * splat(0x1p112f);
  return floats(bits(magnitude) | (h & splat(0x8000u)) << 16);
#endif
}
DW_INLINE F load_i8(const int8_t* p) {
  F a;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  a.part[0] = (NativeF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  float v[16];
  for (int i = 0; i < 16; ++i) v[i] = float(p[i]);
  a = load(v);
#endif
  return a;
}

// e^x to about one unit in the last place; 0 below -87, where results would be denormal. Never sees x above 88.
// Source: Cephes, expf.
DW_INLINE F exp(F x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __mmask16 live = _mm512_cmp_ps_mask((__m512)x.part[0], _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  F n;
  n.part[0] = (NativeF)_mm512_roundscale_ps((__m512)(x * splat(1.44269504088896341f)).part[0], 0);
#else
  const F n = round_even(max(x, splat(-88.0f)) * splat(1.44269504088896341f));
#endif
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = fma(y, r * r, r + splat(1.0f));
#if defined(__AVX512F__) && defined(__AVX512BW__)
  y.part[0] = (NativeF)_mm512_maskz_scalef_ps(live, (__m512)y.part[0], (__m512)n.part[0]);
#else
  U exponent;
  DW_EACH exponent.part[i] = (NativeU)(__builtin_convertvector(n.part[i], NativeI) + 127) << 23;
  y = y * floats(exponent);
  DW_EACH y.part[i] = x.part[i] < -87.0f ? NativeF{} : y.part[i];
#endif
  return y;
}

// acc + a.even * b.even + a.odd * b.odd, on pairs of bfloat16.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
DW_INLINE F dot_bf16(F acc, U a, U b) {
  acc.part[0] = (NativeF)_mm512_dpbf16_ps((__m512)acc.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
  return acc;
}
#endif

// Bytes

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
constexpr bool kHasBytes = true;

// acc + a * b over the four bytes of each lane, a without sign, b with one. Exact.
DW_INLINE U dot_bytes(U acc, U a, U b) {
  acc.part[0] = (NativeU)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)a.part[0], (__m512i)b.part[0]);
  return acc;
}
// Each byte of the result: eight bits of the same 64, from the bit that the byte of `at` names.
DW_INLINE U fields(U at, U from) {
  from.part[0] = (NativeU)_mm512_multishift_epi64_epi8((__m512i)at.part[0], (__m512i)from.part[0]);
  return from;
}
DW_INLINE bool any_nan(F a, F b) {
  return _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_UNORD_Q) != 0;
}
// Put 16 values, rounded, down as bytes, four to a word: 0, 2, 1, 3, then 4, 6, 5, 7 and so on. Returns their sum.
DW_INLINE int32_t store_bytes(uint32_t* to, F values) {
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m512i whole = _mm512_cvtps_epi32((__m512)values.part[0]);
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_permutexvar_epi32(order, whole)));
  return _mm512_reduce_add_epi32(whole);
}
#else
constexpr bool kHasBytes = false;
#endif

DW_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace dw
