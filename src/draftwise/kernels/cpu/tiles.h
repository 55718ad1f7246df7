// Products of tiles of weights and blocks of rows: the inner loops.
#pragma once

#include "matmul.h"

namespace dw {

// 256 inputs, or the last ones, of the tiles that are multiplied together.
struct Slab {
  const uint8_t* codes[kColumns];
  int first, units;
  const uint8_t* turn;  // from here on in the first tile, what is needed soon lies in the next tiles
  int64_t next;         // and this much further
  alignas(64) F scales[kSlabUnits][2][kColumns];  // of each group: scales of the tiles, then minima

  int64_t ahead(const uint8_t* at) const { return at < turn ? kAhead : kAhead + next; }
};

// Goes through a slab's units for a block of R rows. Expanded codes are left in `keep` if Keep.
template <class Mode, int K, int R, bool Keep, bool Fetch>
struct Inner {
  const Slab& slab;
  const Lookup<K>& lookup;
  const float zero;
  const typename Mode::Cell* x;
  const uint8_t* codes[kColumns];
  uint8_t* keep[kColumns];

  // acc += `count` units of codes times the rows' pairs
  DW_INLINE void units(int count, F (&acc)[R][kColumns]) {
    for (; count > 0; --count) {
      if (Fetch) {
        const int64_t ahead = slab.ahead(codes[0]);
        for (int c = 0; c < kColumns; ++c) fetch(codes[c] + ahead, unit_bytes(K));
      }
      pair<0>(acc);
      pair<1>(acc);
      pair<2>(acc);
      pair<3>(acc);
      pair<4>(acc);
      pair<5>(acc);
      pair<6>(acc);
      pair<7>(acc);
      for (int c = 0; c < kColumns; ++c) {
        codes[c] += unit_bytes(K);
        if (Keep) keep[c] += unit_bytes(Mode::kExpanded);
      }
      x += Mode::kCells * R;
    }
  }

  template <int P>
  DW_INLINE void pair(F (&acc)[R][kColumns]) const {
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
      U w[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        w[c] = lookup.template pair<P>(codes[c]);
        if (Keep) store((uint32_t*)keep[c] + P * 16, w[c]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const U b = splat(x[r * 8 + P]);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], b);
      }
#endif
    } else {
      F even[kColumns], odd[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        pair_floats<K, P>(codes[c], zero, even[c], odd[c]);
        if (Keep) store((float*)keep[c] + P * 32, even[c]), store((float*)keep[c] + P * 32 + 16, odd[c]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F a = splat(x[r * 8 + P].even), b = splat(x[r * 8 + P].odd);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = fma(odd[c], b, fma(even[c], a, acc[r][c]));
      }
    }
  }
};

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
// The same with codes and inputs as bytes.
template <int K, int R, bool Keep, bool Fetch>
struct ByteInner {
  const Slab& slab;
  const uint32_t* x;
  const uint8_t* codes[kColumns];
  uint8_t* keep[kColumns];
  static constexpr int kChains = R <= 2 ? 2 : 1;  // sums that do not wait for each other

  // acc += `Count` units of codes times the rows' cells
  template <int Count>
  DW_INLINE void units(U (&acc)[R][kColumns]) {
    U more[R][kColumns];
    if constexpr (kChains == 2)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) more[r][c] = splat(0u);
#pragma GCC unroll 2
    for (int unit = 0; unit < Count; ++unit) {
      if (Fetch) {
        const int64_t ahead = slab.ahead(codes[0]);
        for (int c = 0; c < kColumns; ++c) fetch(codes[c] + ahead, unit_bytes(K));
      }
      quads<0>(acc);
      quads<1>(kChains == 2 ? more : acc);
      quads<2>(acc);
      quads<3>(kChains == 2 ? more : acc);
      for (int c = 0; c < kColumns; ++c) {
        codes[c] += unit_bytes(K);
        if (Keep) keep[c] += unit_bytes(kCodes);
      }
      x += 4 * R;
    }
    if constexpr (kChains == 2)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] = acc[r][c] + more[r][c];
  }

  template <int Q>
  DW_INLINE void quads(U (&acc)[R][kColumns]) const {
    U w[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      w[c] = quad<K, Q>(codes[c]);
      if (Keep) store((uint32_t*)keep[c] + Q * 16, w[c]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const U b = splat(x[r * 4 + Q]);
      for (int c = 0; c < kColumns; ++c) acc[r][c] = dot_bytes(acc[r][c], w[c], b);
    }
  }
};
#endif

template <class Mode>
class TileProduct {
 public:
  TileProduct(const Weights& w, const Rows<Mode>& x) : w_(w), x_(x) {}

  void operator()(int tile, F* total) const {
    switch (w_.kind) {
      case kInt4: return product<kInt4>(tile, total);
      case kInt6: return product<kInt6>(tile, total);
      case kInt8: return product<kInt8>(tile, total);
      case kBf16:
        if constexpr (!std::is_same_v<Mode, Int8Mode>) return product<kBf16>(tile, total);
      default:
        if constexpr (std::is_same_v<Mode, Fp32Mode>) return product<kFp32>(tile, total);
    }
  }

 private:
  // Walk the tiles' slabs from front to back.
  template <int K, class Function>
  DW_INLINE void slabs(int tile, Function f) const {
    const uint8_t* at[kColumns];
    for (int c = 0; c < kColumns; ++c) at[c] = w_.data + std::min(tile + c, w_.tiles() - 1) * w_.tile_bytes;
    Slab slab;
    slab.turn = at[0] + w_.tile_bytes - kAhead;
    slab.next = (kColumns - 1) * w_.tile_bytes;
    for (int first = 0, units = w_.units(); first < units; first += kSlabUnits) {
      slab.first = first;
      slab.units = std::min(kSlabUnits, units - first);
      const Layout layout = Layout::of(w_, slab.units);
      for (int c = 0; c < kColumns; ++c) {
        fetch(at[c] + slab.ahead(at[0]), layout.bytes);
        for (int group = 0; group < layout.groups; ++group) {
          const GroupScale scale = load_scale(w_, layout, at[c], group);
          slab.scales[group][0][c] = scale.scale;
          slab.scales[group][1][c] = scale.minimum;
        }
        slab.codes[c] = at[c] + layout.bytes;
        at[c] = slab.codes[c] + slab.units * unit_bytes(K);
      }
      f(slab);
    }
  }

  // One block's share of a slab, whose codes are as K says. totals: all blocks'.
  template <int K, int R, bool Keep, bool Fetch>
  DW_INLINE void block(const Slab& slab, int block, const Lookup<K>& lookup, const uint8_t* const* codes, F* totals,
                       uint8_t* const* keep) const {
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
    if constexpr (std::is_same_v<Mode, Int8Mode>) return byte_block<K, R, Keep, Fetch>(slab, block, codes, totals, keep);
#endif
    if constexpr (!std::is_same_v<Mode, Int8Mode>) return float_block<K, R, Keep, Fetch>(slab, block, lookup, codes, totals, keep);
  }

  template <int K, int R, bool Keep, bool Fetch>
  DW_INLINE void float_block(const Slab& slab, int block, const Lookup<K>& lookup, const uint8_t* const* codes, F* totals,
                             uint8_t* const* keep) const {
    F* total = totals + block * R * kColumns;
    Inner<Mode, K, R, Keep, Fetch> inner{slab, lookup, float(w_.zero), x_.cells_at(block, slab.first), {}, {}};
    for (int c = 0; c < kColumns; ++c) inner.codes[c] = codes[c], inner.keep[c] = keep[c];
    F acc[R][kColumns];
    if (!w_.group) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] = total[r * kColumns + c];
      inner.units(slab.units, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) total[r * kColumns + c] = acc[r][c];
      return;
    }
    const int width = w_.group / kUnit;
    int group = 0;
    for (int at = 0; at < slab.units; at += width, ++group) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] = dw::zero();
      inner.units(std::min(width, slab.units - at), acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c)
          total[r * kColumns + c] = fma(slab.scales[group][0][c], acc[r][c], total[r * kColumns + c]);
    }
    if (w_.has_minimum) minima<R>(slab, group, x_.facts_at(block, slab.first), total);
  }

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
  template <int K, int R, bool Keep, bool Fetch>
  DW_INLINE void byte_block(const Slab& slab, int block, const uint8_t* const* codes, F* totals, uint8_t* const* keep) const {
    F* total = totals + block * R * kColumns;
    ByteInner<K, R, Keep, Fetch> inner{slab, x_.cells_at(block, slab.first), {}, {}};
    for (int c = 0; c < kColumns; ++c) inner.codes[c] = codes[c], inner.keep[c] = keep[c];
    const float* facts = x_.facts_at(block, slab.first);
    int group = 0, at = 0;
    if (w_.group == kUnit) {
      for (; at < slab.units; ++at, ++group) byte_group<1, R>(slab, group, inner, facts, kUnitSums + at, at / 2, total);
    } else {
      for (; at + 1 < slab.units; at += 2, ++group) byte_group<2, R>(slab, group, inner, facts, kGroupSums + group, group, total);
      if (at < slab.units) byte_group<1, R>(slab, group, inner, facts, kGroupSums + group, group, total), ++group;
    }
    if (w_.has_minimum) minima<R>(slab, group, facts, total);
  }

  // `Units` units, which share a scale; of their inputs, `sum` is where the integers' sum is among the facts.
  template <int Units, int R, class Inner>
  DW_INLINE void byte_group(const Slab& slab, int group, Inner& inner, const float* facts, int sum, int scale, F* total) const {
    const uint32_t shift = uint32_t(-(w_.kind == kInt8 ? 128 : w_.zero));
    U acc[R][kColumns];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const U start = shift ? splat(((const uint32_t*)facts)[r * Int8Mode::kFacts + sum]) * splat(shift) : splat(0u);
      for (int c = 0; c < kColumns; ++c) acc[r][c] = start;
    }
    inner.template units<Units>(acc);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F by = splat(facts[r * Int8Mode::kFacts + kScales + scale]);
      for (int c = 0; c < kColumns; ++c) {
        const F part = convert(acc[r][c]) * by;
        F& all = total[r * kColumns + c];
        all = w_.group ? fma(slab.scales[group][0][c], part, all) : all + part;
      }
    }
  }
#endif

  // The slab's minima, each times the sum of its group's inputs.
  template <int R>
  DW_INLINE void minima(const Slab& slab, int groups, const float* sums, F* total) const {
    float by_group[R][kSlabUnits];
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < kSlabUnits; ++g) {
        const float* sum = sums + Mode::kFacts * r;
        by_group[r][g] = w_.group == kUnit ? sum[g] : g < kSlabUnits / 2 ? sum[2 * g] + sum[2 * g + 1] : 0;
      }
    F acc[R][kColumns];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) acc[r][c] = total[r * kColumns + c];
    for (int g = 0; g < groups; ++g)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F all = splat(by_group[r][g]);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = fma(slab.scales[g][1][c], all, acc[r][c]);
      }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) total[r * kColumns + c] = acc[r][c];
  }

  // All rows in registers: codes are expanded on the way.
  template <int K, int R>
  __attribute__((noinline)) void one_block(int tile, F* total) const {
    const Lookup<K> lookup(w_);
    uint8_t* const keep[2] = {};
    slabs<K>(tile, [&](const Slab& slab) DW_INLINE_LAMBDA { block<K, R, false, true>(slab, 0, lookup, slab.codes, total, keep); });
  }

  // The first block expands codes, and leaves them for the others.
  template <int K, int R>
  __attribute__((noinline)) void many_blocks(int tile, F* total) const {
    constexpr int kExpanded = Mode::kExpanded, kBytes = kSlabUnits * unit_bytes(kExpanded);
    const Lookup<K> lookup(w_);
    const Lookup<kExpanded> none(w_);
    alignas(64) uint8_t expanded[kColumns * kBytes];
    uint8_t* keep[2] = {expanded, expanded + (kColumns - 1) * kBytes};
    slabs<K>(tile, [&](const Slab& slab) DW_INLINE_LAMBDA {
      block<K, R, K != kExpanded, true>(slab, 0, lookup, slab.codes, total, keep);
      const uint8_t* const* codes = K == kExpanded ? slab.codes : keep;
      for (int b = 1; b < x_.blocks; ++b) block<kExpanded, R, false, false>(slab, b, none, codes, total, keep);
    });
  }

  template <int K>
  void product(int tile, F* total) const {
    for (int64_t i = 0; i < int64_t(x_.blocks) * x_.height * kColumns; ++i) total[i] = dw::zero();
    if (x_.blocks == 1)
      by_height<1, Mode::kRows>(x_.height, [&](auto height) { one_block<K, height>(tile, total); });
    else
      by_height<Mode::kRows / 2 + 1, Mode::kRows>(x_.height, [&](auto height) { many_blocks<K, height>(tile, total); });
    if (!w_.group && w_.row_scale) scale_rows(tile, total);
  }

  void scale_rows(int tile, F* total) const {
    for (int c = 0; c < kColumns; ++c) {
      const int at = std::min(tile + c, w_.tiles() - 1) * 16;
      const F scale = load(w_.row_scale + at);
      for (int r = 0; r < x_.n; ++r) total[r * kColumns + c] = total[r * kColumns + c] * scale;
      if (!w_.row_minimum) continue;
      const F minimum = load(w_.row_minimum + at);
      for (int r = 0; r < x_.n; ++r) {
        float all = 0;
        for (int u = 0; u < x_.units; ++u) all += x_.facts_at(r / x_.height, u)[Mode::kFacts * (r % x_.height)];
        total[r * kColumns + c] = fma(minimum, splat(all), total[r * kColumns + c]);
      }
    }
  }

  template <int Least, int Most, class Function>
  static DW_INLINE void by_height(int height, Function f) {
    if constexpr (Most > Least)
      if (height < Most) return by_height<Least, Most - 1>(height, f);
    f(std::integral_constant<int, Most>{});
  }

  const Weights& w_;
  const Rows<Mode>& x_;
};

template <class Mode>
void tile_product(const Weights& w, const Rows<Mode>& x, int tile, F* total) {
  TileProduct<Mode>(w, x)(tile, total);
}

}  // namespace dw
