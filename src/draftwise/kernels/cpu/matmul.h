// y = x W^T for 1 to many rows: a weight is read and expanded once for all rows of the pass.
//
// The order of additions of a row is the same however many rows there are. For each output: inputs in order within a
// group, in one lane; then scale * sum + minimum * (sum of the group's inputs), groups in order.
#pragma once

#include "team.h"
#include "weights.h"

namespace dw {

// How activations are multiplied: pairs of bfloat16, or floats. Both add in float.
struct Bf16Mode {
  using Pair = uint32_t;  // two inputs of a row
};
struct Fp32Mode {
  struct Pair {
    float even, odd;
  };
};

constexpr int kColumns = kLanes == 16 ? 2 : 1;   // tiles in flight
constexpr int kBlockRows = kLanes == 16 ? 8 : 4;  // rows in flight

// Activations of n rows, in blocks of nearly equal height: the pairs of a block's rows lie side by side.
// sums: per unit and row, the sum of its 16 inputs, for minima.
template <class Mode>
struct Rows {
  typename Mode::Pair* pairs;
  float* sums;
  int n, units;

  int blocks() const { return (n + kBlockRows - 1) / kBlockRows; }
  int start(int block) const {
    const int count = blocks(), tall = n % count;
    return block * (n / count) + (block < tall ? block : tall);
  }
  int height(int block) const { return n / blocks() + (block < n % blocks()); }
  typename Mode::Pair* block_pairs(int block) const { return pairs + int64_t(start(block)) * units * 8; }
  float* block_sums(int block) const { return sums + int64_t(start(block)) * units; }

  static int64_t pair_count(int64_t n, int64_t units) { return n * units * 8; }

  void reserve(Buffer& pair_buffer, Buffer& sum_buffer, int rows, int inputs) {
    n = rows;
    units = (inputs + kUnit - 1) / kUnit;
    pairs = pair_buffer.of<typename Mode::Pair>(pair_count(n, units));
    sums = sum_buffer.of<float>(int64_t(n) * units);
  }

  // Put 16 inputs of a row in place.
  DW_INLINE void put(int block, int in_block, int unit, F values) {
    const int stride = height(block);
    typename Mode::Pair* at = block_pairs(block) + int64_t(unit) * 8 * stride + in_block;
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
      const U half = to_bf16(values);
      uint32_t v[16];
      store(v, half);
      for (int p = 0; p < 8; ++p) at[p * stride] = v[2 * p] | v[2 * p + 1] << 16;
      values = floats(half << 16);
    } else {
      float v[16];
      store(v, values);
      for (int p = 0; p < 8; ++p) at[p * stride] = {v[2 * p], v[2 * p + 1]};
    }
    block_sums(block)[unit * stride + in_block] = sum(values);
  }

  int block_of(int row) const {
    const int count = blocks(), low = n / count, tall = n % count;
    return row < tall * (low + 1) ? row / (low + 1) : tall + (row - tall * (low + 1)) / low;
  }
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

template <class Mode, class T>
void pack_row(Rows<Mode>& rows, int row, const T* x, int inputs) {
  const int block = rows.block_of(row), in_block = row - rows.start(block);
  for (int unit = 0; unit < rows.units; ++unit) rows.put(block, in_block, unit, load_input(x, unit * kUnit, inputs));
}

// acc += units of codes times a block's pairs; R rows by kColumns tiles in registers.
template <class Mode, int K, int R>
struct Inner {
  const Lookup<K>& lookup;
  float zero;

  template <int P>
  DW_INLINE void pair(const uint8_t* const* unit, const typename Mode::Pair* x, F (&acc)[R][kColumns]) const {
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
      U w[kColumns];
      for (int c = 0; c < kColumns; ++c) w[c] = lookup.template pair<P>(unit[c]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const U b = splat(x[P * R + r]);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], b);
      }
#endif
    } else {
      F even[kColumns], odd[kColumns];
      for (int c = 0; c < kColumns; ++c) pair_floats<K, P>(unit[c], zero, even[c], odd[c]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F a = splat(x[P * R + r].even), b = splat(x[P * R + r].odd);
        for (int c = 0; c < kColumns; ++c) acc[r][c] = fma(odd[c], b, fma(even[c], a, acc[r][c]));
      }
    }
  }

  DW_INLINE void units(const uint8_t* const* codes, int count, const typename Mode::Pair* x, F (&acc)[R][kColumns]) const {
    const uint8_t* at[kColumns];
    for (int c = 0; c < kColumns; ++c) at[c] = codes[c];
    for (int u = 0; u < count; ++u) {
      for (int c = 0; c < kColumns; ++c) __builtin_prefetch(at[c] + 1024);
      pair<0>(at, x, acc);
      pair<1>(at, x, acc);
      pair<2>(at, x, acc);
      pair<3>(at, x, acc);
      pair<4>(at, x, acc);
      pair<5>(at, x, acc);
      pair<6>(at, x, acc);
      pair<7>(at, x, acc);
      for (int c = 0; c < kColumns; ++c) at[c] += unit_bytes(K);
      x += 8 * R;
    }
  }
};

// The kColumns tiles from `tile` on, for all rows. total: float [n][kColumns * 16], overwritten.
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
  static constexpr int kExpanded = std::is_same_v<Mode, Bf16Mode> ? kBf16 : kFp32;

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

  template <int K, int R>
  DW_INLINE void block(const Segment& s, int block, const Lookup<K>& lookup, const uint8_t* const* codes, F* total) const {
    const Inner<Mode, K, R> inner{lookup, float(w_.zero)};
    const typename Mode::Pair* x = x_.block_pairs(block) + int64_t(s.unit) * 8 * R;
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
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < kColumns; ++c)
        total[r * kColumns + c] = fma(s.scale[c].scale, acc[r][c], total[r * kColumns + c]);
    if (w_.has_minimum) {
      const float* sums = x_.block_sums(block) + s.unit * R;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F all = splat(s.units == 2 ? sums[r] + sums[R + r] : sums[r]);
        for (int c = 0; c < kColumns; ++c)
          total[r * kColumns + c] = fma(s.scale[c].minimum, all, total[r * kColumns + c]);
      }
    }
  }

  template <int K, int R>
  __attribute__((noinline)) void one_block(int tile, F* total) const {
    const Lookup<K> lookup(w_);
    segments<K>(tile, [&](const Segment& s) { block<K, R>(s, 0, lookup, s.codes, total); });
  }

  template <int R>
  __attribute__((noinline)) void blocks_of(const Segment& s, const uint8_t* const* codes, int first, int count, F* total) const {
    const Lookup<kExpanded> none(w_);
    for (int b = first; b < first + count; ++b)
      block<kExpanded, R>(s, b, none, codes, total + int64_t(x_.start(b)) * kColumns);
  }

  template <int K>
  void product(int tile, F* total) const {
    for (int64_t i = 0; i < int64_t(x_.n) * kColumns; ++i) total[i] = dw::zero();
    if (x_.blocks() == 1)
      by_height(x_.n, [&](auto height) { one_block<K, height>(tile, total); });
    else
      many_blocks<K>(tile, total);
    if (!w_.group && w_.row_scale) scale_rows(tile, total);
  }

  template <int K>
  void many_blocks(int tile, F* total) const {
    const Lookup<K> lookup(w_);
    alignas(64) uint8_t expanded[kColumns][kSlabUnits * unit_bytes(kExpanded)];
    const int blocks = x_.blocks(), tall = x_.n % blocks, low = x_.n / blocks;
    segments<K>(tile, [&](const Segment& s) {
      const uint8_t* codes[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        codes[c] = s.codes[c];
        if constexpr (K != kExpanded) {
          expand<K>(lookup, s.codes[c], s.units, expanded[c]);
          codes[c] = expanded[c];
        }
      }
      if (tall) by_height(low + 1, [&](auto height) { blocks_of<height>(s, codes, 0, tall, total); });
      by_height(low, [&](auto height) { blocks_of<height>(s, codes, tall, blocks - tall, total); });
    });
  }

  template <int K>
  DW_INLINE void expand(const Lookup<K>& lookup, const uint8_t* unit, int units, uint8_t* to) const {
    for (int u = 0; u < units; ++u, unit += unit_bytes(K), to += unit_bytes(kExpanded)) {
      expand_pair<K, 0>(lookup, unit, to);
      expand_pair<K, 1>(lookup, unit, to);
      expand_pair<K, 2>(lookup, unit, to);
      expand_pair<K, 3>(lookup, unit, to);
      expand_pair<K, 4>(lookup, unit, to);
      expand_pair<K, 5>(lookup, unit, to);
      expand_pair<K, 6>(lookup, unit, to);
      expand_pair<K, 7>(lookup, unit, to);
    }
  }
  template <int K, int P>
  DW_INLINE void expand_pair(const Lookup<K>& lookup, const uint8_t* unit, uint8_t* to) const {
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
      store((uint32_t*)to + P * 16, lookup.template pair<P>(unit));
#endif
    } else {
      F even, odd;
      pair_floats<K, P>(unit, float(w_.zero), even, odd);
      store((float*)to + P * 32, even);
      store((float*)to + P * 32 + 16, odd);
    }
  }

  void scale_rows(int tile, F* total) const {
    for (int c = 0; c < kColumns; ++c) {
      const int at = std::min(tile + c, w_.tiles() - 1) * 16;
      const F scale = load(w_.row_scale + at);
      for (int r = 0; r < x_.n; ++r) total[r * kColumns + c] = total[r * kColumns + c] * scale;
      if (!w_.row_minimum) continue;
      const F minimum = load(w_.row_minimum + at);
      for (int b = 0; b < x_.blocks(); ++b) {
        const int height = x_.height(b);
        const float* sums = x_.block_sums(b);
        for (int r = 0; r < height; ++r) {
          float all = 0;
          for (int u = 0; u < x_.units; ++u) all += sums[u * height + r];
          F& t = total[(x_.start(b) + r) * kColumns + c];
          t = fma(minimum, splat(all), t);
        }
      }
    }
  }

  template <class Function>
  static DW_INLINE void by_height(int height, Function f) {
    switch (height) {
      case 1: return f(std::integral_constant<int, 1>{});
      case 2: return f(std::integral_constant<int, 2>{});
      case 3: return f(std::integral_constant<int, 3>{});
      case 4: return f(std::integral_constant<int, 4>{});
    }
    if constexpr (kBlockRows > 4) switch (height) {
      case 5: return f(std::integral_constant<int, 5>{});
      case 6: return f(std::integral_constant<int, 6>{});
      case 7: return f(std::integral_constant<int, 7>{});
      case 8: return f(std::integral_constant<int, 8>{});
    }
  }

  const Weights& w_;
  const Rows<Mode>& x_;
};

}  // namespace dw
