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

// The kColumns tiles from `tile` on, for all rows. total: float [padded n][kColumns * 16], overwritten.
// Defined in tiles.h, which takes long to compile: once for each mode, in tiles_bf16.cpp and tiles_fp32.cpp.
template <class Mode>
void tile_product(const Weights& w, const Rows<Mode>& x, int tile, F* total);

}  // namespace dw
