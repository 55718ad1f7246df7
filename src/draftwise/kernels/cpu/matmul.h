// y = x W^T for 1 to many rows: a weight is read and expanded once for all rows of the pass.
//
// The order of additions of a row is the same however many rows there are. For each output: inputs in order within a
// group, in one lane; then scale * sum + minimum * (sum of the group's inputs), groups in order.
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
constexpr int kAhead = 2048;  // bytes that a tile is fetched ahead of its use

// Put 16 values at the first of 8 pairs that lie `stride` apart; returns them as rounded.
template <class Mode>
DW_INLINE F put_pairs(typename Mode::Pair* at, int stride, F values) {
  if constexpr (std::is_same_v<Mode, Bf16Mode>) {
    alignas(32) uint16_t half[16];
    store_bf16(half, values);
    for (int p = 0; p < 8; ++p) std::memcpy(at + p * stride, half + 2 * p, 4);
    return load_bf16(half);
  } else {
    float v[16];
    store(v, values);
    for (int p = 0; p < 8; ++p) at[p * stride] = {v[2 * p], v[2 * p + 1]};
    return values;
  }
}

// Activations of n rows in blocks of one height, the last filled up with zero rows. The pairs of a block's rows lie side
// by side: [block][unit][8][height].
// sums: per unit and row, the sum of its 16 inputs, for minima: [block][unit][height].
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
  }

  // Put 16 inputs of a row in place.
  DW_INLINE void put(int row, int unit, F values) const {
    const int block = row / height, in_block = row % height;
    const int64_t first = int64_t(block) * units * height;
    const F rounded = put_pairs<Mode>(pairs + 8 * (first + int64_t(unit) * height) + in_block, height, values);
    sums[first + unit * height + in_block] = sum(rounded);
  }
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
    auto* sums = sums_.of<float>(most * units);
    chunks_.clear();
    for (int64_t first = 0; first < rows; first += kChunkRows)
      chunks_.emplace_back(int(std::min<int64_t>(kChunkRows, rows - first)), units, pairs + first * units * 8, sums + first * units);
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

template <int K>
DW_INLINE void fetch_ahead(const uint8_t* unit) {
  for (int line = 0; line < unit_bytes(K); line += 64) __builtin_prefetch(unit + kAhead + line);
}

// acc += units of codes times a block's pairs; R rows by kColumns tiles in registers. Expanded codes are left in `keep` if Keep.
template <class Mode, int K, int R, bool Keep>
struct Inner {
  const Lookup<K>& lookup;
  float zero;
  uint8_t* keep[kColumns];

  template <int P>
  DW_INLINE void pair(const uint8_t* const* unit, const typename Mode::Pair* x, F (&acc)[R][kColumns]) {
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
      U w[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        w[c] = lookup.template pair<P>(unit[c]);
        if (Keep) store((uint32_t*)keep[c] + P * 16, w[c]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const U b = splat(x[P * R + r]);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], b);
      }
#endif
    } else {
      F even[kColumns], odd[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        pair_floats<K, P>(unit[c], zero, even[c], odd[c]);
        if (Keep) store((float*)keep[c] + P * 32, even[c]), store((float*)keep[c] + P * 32 + 16, odd[c]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F a = splat(x[P * R + r].even), b = splat(x[P * R + r].odd);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = fma(odd[c], b, fma(even[c], a, acc[r][c]));
      }
    }
  }

  DW_INLINE void units(const uint8_t* const* codes, int count, const typename Mode::Pair* x, F (&acc)[R][kColumns]) {
    const uint8_t* at[kColumns];
    for (int c = 0; c < kColumns; ++c) at[c] = codes[c];
    for (int u = 0; u < count; ++u) {
      for (int c = 0; c < kColumns; ++c) fetch_ahead<K>(at[c]);
      pair<0>(at, x, acc);
      pair<1>(at, x, acc);
      pair<2>(at, x, acc);
      pair<3>(at, x, acc);
      pair<4>(at, x, acc);
      pair<5>(at, x, acc);
      pair<6>(at, x, acc);
      pair<7>(at, x, acc);
      for (int c = 0; c < kColumns; ++c) {
        at[c] += unit_bytes(K);
        if (Keep) keep[c] += unit_bytes(Mode::kExpanded);
      }
      x += 8 * R;
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
  struct Segment {  // units that share a scale, or a slab
    const uint8_t* codes[kColumns];
    int unit, units;
    GroupScale scale[kColumns];
  };

  // Walk the tiles' segments from front to back.
  template <int K, class Function>
  DW_INLINE void segments(int tile, Function f) const {
    const uint8_t* slab[kColumns];
    for (int c = 0; c < kColumns; ++c) slab[c] = w_.data + std::min(tile + c, w_.tiles() - 1) * w_.tile_bytes;
    const int units = w_.units(), width = w_.group ? w_.group / kUnit : kSlabUnits;
    for (int first = 0; first < units; first += kSlabUnits) {
      const int count = std::min(kSlabUnits, units - first);
      const Layout layout = Layout::of(w_, count);
      Segment s;
      for (int at = 0, group = 0; at < count; at += width, ++group) {
        s.unit = first + at;
        s.units = std::min(width, count - at);
        for (int c = 0; c < kColumns; ++c) {
          s.codes[c] = slab[c] + layout.bytes + at * unit_bytes(K);
          if (w_.group) s.scale[c] = load_scale(w_, layout, slab[c], group);
        }
        f(s);
      }
      for (int c = 0; c < kColumns; ++c) slab[c] += layout.bytes + count * unit_bytes(K);
    }
  }

  // One block's share of a segment. x, sums, total: the block's own, from the segment's first unit on.
  template <int K, int R, bool Keep>
  DW_INLINE void block(const Segment& s, const Lookup<K>& lookup, const uint8_t* const* codes, const typename Mode::Pair* x,
                       const float* sums, F* total, uint8_t* keep) const {
    Inner<Mode, K, R, Keep> inner{lookup, float(w_.zero), {}};
    for (int c = 0; c < kColumns; ++c) inner.keep[c] = keep + c * kSlabUnits * unit_bytes(Mode::kExpanded);
    F acc[R][kColumns];
    if (!w_.group) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) acc[r][c] = total[r * kColumns + c];
      inner.units(codes, s.units, x, acc);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) total[r * kColumns + c] = acc[r][c];
      return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c) acc[r][c] = dw::zero();
    inner.units(codes, s.units, x, acc);
    if (w_.has_minimum) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F all = splat(s.units == 2 ? sums[r] + sums[R + r] : sums[r]);
        for (int c = 0; c < kColumns; ++c) {
          F& t = total[r * kColumns + c];
          t = fma(s.scale[c].minimum, all, fma(s.scale[c].scale, acc[r][c], t));
        }
      }
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < kColumns; ++c) {
          F& t = total[r * kColumns + c];
          t = fma(s.scale[c].scale, acc[r][c], t);
        }
    }
  }

  // All rows in registers: codes are expanded on the way.
  template <int K, int R>
  __attribute__((noinline)) void one_block(int tile, F* total) const {
    const Lookup<K> lookup(w_);
    const typename Mode::Pair* x = x_.pairs;
    const float* sums = x_.sums;
    segments<K>(tile, [&](const Segment& s) DW_INLINE_LAMBDA {
      block<K, R, false>(s, lookup, s.codes, x + int64_t(s.unit) * 8 * R, sums + s.unit * R, total, nullptr);
    });
  }

  // The first block expands codes, and leaves them for the others.
  template <int K, int R>
  __attribute__((noinline)) void many_blocks(int tile, F* total) const {
    constexpr int kExpanded = Mode::kExpanded;
    const Lookup<K> lookup(w_);
    const Lookup<kExpanded> none(w_);
    alignas(64) uint8_t expanded[kColumns * kSlabUnits * unit_bytes(Mode::kExpanded)];
    const int blocks = x_.blocks;
    const int64_t pair_step = int64_t(x_.units) * 8 * R, sum_step = int64_t(x_.units) * R;
    segments<K>(tile, [&](const Segment& s) DW_INLINE_LAMBDA {
      const typename Mode::Pair* x = x_.pairs + int64_t(s.unit) * 8 * R;
      const float* sums = x_.sums + s.unit * R;
      F* t = total;
      const uint8_t* codes[kColumns];
      for (int c = 0; c < kColumns; ++c)
        codes[c] = K == kExpanded ? s.codes[c] : expanded + c * kSlabUnits * unit_bytes(Mode::kExpanded);
      block<K, R, K != kExpanded>(s, lookup, s.codes, x, sums, t, expanded);
      for (int b = 1; b < blocks; ++b) {
        x += pair_step;
        sums += sum_step;
        t += R * kColumns;
        block<kExpanded, R, false>(s, none, codes, x, sums, t, nullptr);
      }
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
        const float* sums = x_.sums + int64_t(r / x_.height) * x_.units * x_.height + r % x_.height;
        float all = 0;
        for (int u = 0; u < x_.units; ++u) all += sums[u * x_.height];
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
