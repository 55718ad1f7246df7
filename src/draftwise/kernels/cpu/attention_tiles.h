// Attention's products in the processor's own tiles, which multiply up to sixteen rows at once (AMX).
//
// A page of sixteen keys is one product, so sums have one order whatever pages a row reads together with others.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "simd.h"

namespace dw {

constexpr int kTileRows = 16;
constexpr int kTileDims = 32;  // channels, pairs of bfloat16, that a product of a page's keys takes at once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
constexpr bool kHasTiles = true;

// The compiler does not know what tiles read: here `from`, and all else that was stored before, is in memory.
DW_INLINE void stored(const void* from) { asm volatile("" ::"r"(from) : "memory"); }

// What the tiles hold, from here to the end of scope. Scores: 0 sums, 1 and 2 keys, 3 to 6 queries.
// Values, for so many query rows: 0 to 3 sums, 4 and 5 weights, 6 and 7 values.
class Tiles {
 public:
  static Tiles for_scores() { return Tiles({64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16}); }
  static Tiles for_values(int rows) {
    const uint8_t r = uint8_t(rows);
    return Tiles({64, 64, 64, 64, 32, 32, 64, 64}, {r, r, r, r, r, r, 8, 8});
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Tiles(std::initializer_list<uint16_t> bytes, std::initializer_list<uint8_t> rows) {
    Shapes shapes;
    std::copy(bytes.begin(), bytes.end(), shapes.bytes);
    std::copy(rows.begin(), rows.end(), shapes.rows);
    stored(&shapes);
    _tile_loadconfig(&shapes);
  }
};

// Queries of sixteen slots, [pairs][16]: one slot a lane.
DW_INLINE void load_queries(const uint8_t* queries, int steps) {
  stored(queries);
  _tile_loadd(3, queries, 64);
  if (steps > 1) _tile_loadd(4, queries + 1024, 64);
  if (steps > 2) _tile_loadd(5, queries + 2048, 64);
  if (steps > 3) _tile_loadd(6, queries + 3072, 64);
}

// Products of sixteen keys with the queries that were loaded, [keys][16 slots]. stride: bytes from a key to the next.
DW_INLINE void key_products(const void* keys, int64_t stride, int steps, float* products) {
  const uint8_t* from = (const uint8_t*)keys;
  stored(from);
  _tile_zero(0);
  _tile_loadd(1, from, stride);
  _tile_dpbf16ps(0, 1, 3);
  if (steps > 1) {
    _tile_loadd(2, from + 64, stride);
    _tile_dpbf16ps(0, 2, 4);
  }
  if (steps > 2) {
    _tile_loadd(1, from + 128, stride);
    _tile_dpbf16ps(0, 1, 5);
  }
  if (steps > 3) {
    _tile_loadd(2, from + 192, stride);
    _tile_dpbf16ps(0, 2, 6);
  }
  _tile_stored(0, products, 64);
}

// Of four slots, one after another in `products` [keys][16], a vector each with one key a lane.
DW_INLINE void turn_slots(const float* products, F (&to)[4]) {
  __m512 z[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const float* at = products + k * 16;
    z[k] = _mm512_castps128_ps512(_mm_loadu_ps(at));
    z[k] = _mm512_insertf32x4(z[k], _mm_loadu_ps(at + 64), 1);
    z[k] = _mm512_insertf32x4(z[k], _mm_loadu_ps(at + 128), 2);
    z[k] = _mm512_insertf32x4(z[k], _mm_loadu_ps(at + 192), 3);
  }
  const __m512d low[2] = {(__m512d)_mm512_unpacklo_ps(z[0], z[1]), (__m512d)_mm512_unpacklo_ps(z[2], z[3])};
  const __m512d high[2] = {(__m512d)_mm512_unpackhi_ps(z[0], z[1]), (__m512d)_mm512_unpackhi_ps(z[2], z[3])};
  to[0].part[0] = (NativeF)_mm512_unpacklo_pd(low[0], low[1]);
  to[1].part[0] = (NativeF)_mm512_unpackhi_pd(low[0], low[1]);
  to[2].part[0] = (NativeF)_mm512_unpacklo_pd(high[0], high[1]);
  to[3].part[0] = (NativeF)_mm512_unpackhi_pd(high[0], high[1]);
}

// Of sixteen value rows some channels, 16 * Chunks, as pairs of keys: [Chunks][8 pairs][16 channels]. Of 32 channels the first
// vector has 0 .. 3, 8 .. 11 and so on, the second the others, since so they come apart fastest; `in_order` mends it.
template <int Chunks>
DW_INLINE void pair_values(const uint16_t* const* rows, int channel, uint8_t* to) {
#pragma GCC unroll 8
  for (int j = 0; j < kTileRows; j += 2)
#pragma GCC unroll 2
    for (int c = 0; c < Chunks; c += 2) {
      const int at = channel + c * 16;
      const __m512i even = _mm512_loadu_si512(rows[j] + at), odd = _mm512_loadu_si512(rows[j + 1] + at);
      _mm512_storeu_si512(to + c * 512 + j * 32, _mm512_unpacklo_epi16(even, odd));
      _mm512_storeu_si512(to + c * 512 + 512 + j * 32, _mm512_unpackhi_epi16(even, odd));
    }
}

// sums [rows][dims], in the order of `pair_values`, += weights times the values of pages [low, high), in 16 * Chunks channels.
// rows_of(page) points at sixteen value rows. weights: 32 bytes a page, `stride` bytes from a row to the next. Of two blocks of
// rows the second's weights and sums lie `weights_on` and `sums_on` bytes further.
template <int Chunks, int Blocks, class RowsOf>
DW_INLINE void value_products(RowsOf rows_of, int low, int high, int channel, int dims, const void* weights, int64_t stride,
                              int64_t weights_on, float* sums, int64_t sums_on) {
  static_assert(Chunks * Blocks <= 4);
  if (low >= high) return;
  alignas(64) uint8_t paired[2][Chunks * 512];  // one is multiplied while the other is filled
  const int64_t row_bytes = dims * 4;
  uint8_t* const to = (uint8_t*)(sums + channel);
  const auto multiply = [&](int page) {
    const uint8_t *from = paired[page % 2], *by = (const uint8_t*)weights + page * 32;
    stored(from);
    _tile_loadd(4, by, stride);
    if (Blocks == 2) _tile_loadd(5, by + weights_on, stride);
    _tile_loadd(6, from, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (Blocks == 2) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, from + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (Blocks == 2) _tile_dpbf16ps(3, 5, 7);
    if (Chunks == 4) {
      _tile_loadd(6, from + 1024, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, from + 1536, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  };
  constexpr bool kMore = Chunks * Blocks == 4;
  const int64_t second = Chunks == 4 ? 128 : sums_on;
  _tile_loadd(0, to, row_bytes);
  _tile_loadd(1, to + 64, row_bytes);
  if (kMore) {
    _tile_loadd(2, to + second, row_bytes);
    _tile_loadd(3, to + second + 64, row_bytes);
  }
  for (int page = low; page < high; ++page) {
    pair_values<Chunks>(rows_of(page), channel, paired[page % 2]);
    if (page > low) multiply(page - 1);
  }
  multiply(high - 1);
  _tile_stored(0, to, row_bytes);
  _tile_stored(1, to + 64, row_bytes);
  if (kMore) {
    _tile_stored(2, to + second, row_bytes);
    _tile_stored(3, to + second + 64, row_bytes);
  }
}

// Channels in their own order, from that of `pair_values`.
DW_INLINE void in_order(float* sums, int dims) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int d = 0; d < dims; d += 32) {
    const __m512 a = _mm512_loadu_ps(sums + d), b = _mm512_loadu_ps(sums + d + 16);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(sums + d + 16, _mm512_permutex2var_ps(a, second, b));
  }
}
#else
constexpr bool kHasTiles = false;
#endif

}  // namespace dw
