// y = x W^T for 1 to many rows: a weight is read and expanded once for all rows of the pass.
//
// The order of additions of a row is the same however many rows there are. For each output, slab by slab: inputs in order
// within a group, in one lane, then scale * sum, groups in order; then minimum * (sum of the group's inputs), in order.
#pragma once

#include <type_traits>
#include <vector>

#include "team.h"
#include "weights.h"

namespace dw {

// How activations are multiplied: pairs of bfloat16, or floats. Both add in float.
struct Bf16Mode {
  using Pair = uint32_t;  // two inputs of a row
  static constexpr int kRows = 12, kExpanded = kBf16;
};
struct Fp32Mode {
  struct Pair {
    float even, odd;
  };
  static constexpr int kRows = kLanes == 16 ? 6 : 4, kExpanded = kFp32;
};
// Tiles by rows in registers: columns * Mode::kRows sums.
constexpr int kColumns = kLanes == 16 ? 2 : 1;
constexpr int kAhead = 4096;  // bytes that a tile is fetched ahead of its use

// Put 16 values down as 8 pairs; returns them as rounded.
template <class Mode>
DW_INLINE F put_pairs(typename Mode::Pair* at, F values) {
  if constexpr (std::is_same_v<Mode, Bf16Mode>) {
    store_bf16((uint16_t*)at, values);
    return load_bf16((const uint16_t*)at);
  } else {
    store((float*)at, values);
    return values;
  }
}

// Activations of n rows in blocks of one height, the last filled up with zero rows: [block][unit][height][8 pairs].
// sums: of the 16 inputs of each unit, for minima: [block][unit / 16][height][16]. A line of memory belongs to few rows, so
// that threads that fill rows do not share lines.
template <class Mode>
struct Rows {
  using Pair = typename Mode::Pair;
  Pair* pairs;
  float* sums;
  int n, units, blocks, height;

  Rows() = default;
  Rows(int rows, int unit_count, Pair* pair_memory, float* sum_memory)
      : pairs(pair_memory),
        sums(sum_memory),
        n(rows),
        units(unit_count),
        blocks((n + Mode::kRows - 1) / Mode::kRows),
        height((n + blocks - 1) / blocks) {
    for (int row = n; row < blocks * height; ++row)
      for (int unit = 0; unit < units; ++unit) put(row, unit, zero());
    if (units % 2)  // half a group of 32
      for (int row = 0; row < blocks * height; ++row) sums_at(row / height, units)[kSlabUnits * (row % height)] = 0;
  }

  // Where the first row of a block has its pairs, and its sums, for a unit.
  DW_INLINE Pair* pairs_at(int block, int unit) const { return pairs + 8 * int64_t(block * units + unit) * height; }
  DW_INLINE float* sums_at(int block, int unit) const {
    return sums + kSlabUnits * int64_t(block * slabs(units) + unit / kSlabUnits) * height + unit % kSlabUnits;
  }
  // Put 16 inputs of a row in place.
  DW_INLINE void put(int row, int unit, F values) const {
    const int block = row / height, in_block = row % height;
    const F rounded = put_pairs<Mode>(pairs_at(block, unit) + 8 * in_block, values);
    sums_at(block, unit)[kSlabUnits * in_block] = sum(rounded);
  }

  static int slabs(int units) { return (units + kSlabUnits - 1) / kSlabUnits; }
};

constexpr int kChunkRows = 144;  // rows that pass over a weight tile together: full blocks in every mode

// Any number of rows, in chunks.
template <class Mode>
class Activations {
 public:
  void reserve(int64_t rows, int inputs) {
    const int units = (inputs + kUnit - 1) / kUnit;
    const int64_t most = rows + Mode::kRows;  // only the last chunk is filled up
    auto* pairs = pairs_.of<typename Mode::Pair>(most * units * 8);
    const int64_t row_sums = Rows<Mode>::slabs(units) * kSlabUnits;
    auto* sums = sums_.of<float>(most * row_sums);
    chunks_.clear();
    for (int64_t first = 0; first < rows; first += kChunkRows)
      chunks_.emplace_back(int(std::min<int64_t>(kChunkRows, rows - first)), units, pairs + first * units * 8, sums + first * row_sums);
  }
  int chunks() const { return int(chunks_.size()); }
  const Rows<Mode>& chunk(int i) const { return chunks_[i]; }
  DW_INLINE void put(int64_t row, int unit, F values) const { chunks_[row / kChunkRows].put(int(row % kChunkRows), unit, values); }

 private:
  Buffer pairs_, sums_;
  std::vector<Rows<Mode>> chunks_;
};

// One row of float or bfloat16 input, 16 at a time, zeros past its end.
DW_INLINE F load_input(const float* x, int at, int count) {
  if (at + 16 <= count) return load(x + at);
  float v[16] = {};
  for (int i = 0; at + i < count; ++i) v[i] = x[at + i];
  return load(v);
}
DW_INLINE F load_input(const uint16_t* x, int at, int count) {
  if (at + 16 <= count) return load_bf16(x + at);
  float v[16] = {};
  for (int i = 0; at + i < count; ++i) v[i] = from_bf16(x[at + i]);
  return load(v);
}

DW_INLINE void fetch(const uint8_t* from, int bytes) {
  for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
}

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
  const typename Mode::Pair* x;
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
      x += 8 * R;
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

// The kColumns tiles from `tile` on, for all rows. total: float [padded n][kColumns * 16], overwritten.
template <class Mode>
class TileProduct {
 public:
  TileProduct(const Weights& w, const Rows<Mode>& x) : w_(w), x_(x) {}

  void operator()(int tile, F* total) const {
    switch (w_.kind) {
      case kInt4: return product<kInt4>(tile, total);
      case kInt6: return product<kInt6>(tile, total);
      case kInt8: return product<kInt8>(tile, total);
      case kBf16: return product<kBf16>(tile, total);
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
    F* total = totals + block * R * kColumns;
    Inner<Mode, K, R, Keep, Fetch> inner{slab, lookup, float(w_.zero), x_.pairs_at(block, slab.first), {}, {}};
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
    if (w_.has_minimum) minima<R>(slab, group, x_.sums_at(block, slab.first), total);
  }

  // The slab's minima, each times the sum of its group's inputs.
  template <int R>
  DW_INLINE void minima(const Slab& slab, int groups, const float* sums, F* total) const {
    float by_group[R][kSlabUnits];
    for (int r = 0; r < R; ++r)
      for (int g = 0; g < kSlabUnits; ++g) {
        const float* sum = sums + kSlabUnits * r;
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
        for (int u = 0; u < x_.units; ++u) all += x_.sums_at(r / x_.height, u)[kSlabUnits * (r % x_.height)];
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

// Compiled apart, in tiles_bf16.cpp and tiles_fp32.cpp.
extern template class TileProduct<Bf16Mode>;
extern template class TileProduct<Fp32Mode>;

}  // namespace dw
