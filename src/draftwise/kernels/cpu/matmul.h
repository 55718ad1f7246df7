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

// How activations are multiplied. A cell is the inputs of a row that are multiplied at once, kCells of them a unit; kFacts:
// floats kept of a slab's inputs. kExpanded: what codes become. Attention: the mode of attention beside such products.
struct Bf16Mode {  // pairs of bfloat16, added in float
  using Cell = uint32_t;
  using Attention = Bf16Mode;
  static constexpr int kCells = 8, kFacts = 16, kRows = 12, kExpanded = kBf16;
};
struct Fp32Mode {  // floats
  struct Cell {
    float even, odd;
  };
  using Attention = Fp32Mode;
  static constexpr int kCells = 8, kFacts = 16, kRows = kLanes == 16 ? 6 : 4, kExpanded = kFp32;
};
struct Int8Mode {  // inputs as bytes times a scale for each 32, added as integers within a group
  using Cell = uint32_t;
  using Attention = Bf16Mode;
  static constexpr int kCells = 4, kFacts = 48, kRows = 12, kExpanded = kCodes;
};
constexpr int kUnitSums = 16, kGroupSums = 32, kScales = 40;  // where further facts of Int8Mode begin: integers, integers, floats

// Tiles by rows in registers: columns * Mode::kRows sums.
constexpr int kColumns = kLanes == 16 ? 2 : 1;
constexpr int kAhead = 8192;  // bytes that a tile is fetched ahead of its use

// Put 16 values down as 8 pairs; returns them as rounded.
template <class Mode>
DW_INLINE F put_pairs(typename Mode::Cell* at, F values) {
  if constexpr (std::is_same_v<Mode, Bf16Mode>) {
    store_bf16((uint16_t*)at, values);
    return load_bf16((const uint16_t*)at);
  } else {
    store((float*)at, values);
    return values;
  }
}

// Activations of n rows in blocks of one height, the last filled up with zero rows: [block][unit][height][cells].
// facts: of each slab, [block][slab][height][kFacts]: the sum of each unit's inputs, for minima; in Int8Mode also that sum in
// integers, for each unit and each two, and the scale of each two. A line of memory belongs to few rows, so that threads that
// fill rows do not share lines.
template <class Mode>
struct Rows {
  using Cell = typename Mode::Cell;
  static constexpr bool kInts = std::is_same_v<Mode, Int8Mode>;
  Cell* cells;
  float* facts;
  int n, units, blocks, height;

  Rows() = default;
  Rows(int rows, int unit_count, Cell* cell_memory, float* fact_memory)
      : cells(cell_memory),
        facts(fact_memory),
        n(rows),
        units(unit_count),
        blocks((n + Mode::kRows - 1) / Mode::kRows),
        height((n + blocks - 1) / blocks) {
    for (int row = n; row < blocks * height; ++row)
      for (int unit = 0; unit < units; unit += 2) put(row, unit, zero(), zero());
    if (units % 2)  // half a group of 32
      for (int row = 0; row < blocks * height; ++row) facts_at(row / height, units)[Mode::kFacts * (row % height)] = 0;
  }

  // Where the first row of a block has its cells, and its facts, for a unit.
  DW_INLINE Cell* cells_at(int block, int unit) const { return cells + Mode::kCells * int64_t(block * units + unit) * height; }
  DW_INLINE float* facts_at(int block, int unit) const {
    return facts + Mode::kFacts * int64_t(block * slabs(units) + unit / kSlabUnits) * height + unit % kSlabUnits;
  }
  // Put 32 inputs of a row in place, from an even unit on; those of a unit that is not there are left out.
  DW_INLINE void put(int row, int unit, F first, F second) const {
    if constexpr (kInts) {
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
      const int block = row / height, in_block = row % height;
      float* facts = facts_at(block, unit) + Mode::kFacts * in_block;
      Cell* cells = cells_at(block, unit) + Mode::kCells * in_block;
      const float most = any_nan(first, second) ? NAN : largest(max(max(first, zero() - first), max(second, zero() - second)));
      const F factor = splat(most > 1e-30f && most < INFINITY ? 127.0f / most : 0.0f);
      const float scale = most / 127.0f;
      const int32_t sums[2] = {store_bytes(cells, first * factor), store_bytes(cells + Mode::kCells * height, second * factor)};
      const int32_t both = sums[0] + sums[1];
      const int at = unit % kSlabUnits;
      std::memcpy(facts + kUnitSums, sums, 8);
      std::memcpy(facts - at + kGroupSums + at / 2, &both, 4);
      facts[-at + kScales + at / 2] = scale;
      facts[0] = scale * float(sums[0]), facts[1] = scale * float(sums[1]);
#endif
    } else {
      put(row, unit, first);
      if (unit + 1 < units) put(row, unit + 1, second);
    }
  }
  // Put 16 inputs in place; not in Int8Mode.
  DW_INLINE void put(int row, int unit, F values) const {
    static_assert(!kInts);
    const int block = row / height, in_block = row % height;
    facts_at(block, unit)[Mode::kFacts * in_block] = sum(put_pairs<Mode>(cells_at(block, unit) + Mode::kCells * in_block, values));
  }

  static int slabs(int units) { return (units + kSlabUnits - 1) / kSlabUnits; }
};

constexpr int kChunkRows = 144;  // rows that pass over a weight tile together: full blocks in every mode

// Any number of rows, in chunks.
template <class Mode>
class Activations {
 public:
  void reserve(int64_t rows, int inputs) {
    const int units = Rows<Mode>::kInts ? (inputs + 2 * kUnit - 1) / (2 * kUnit) * 2 : (inputs + kUnit - 1) / kUnit;
    const int64_t most = rows + Mode::kRows;  // only the last chunk is filled up
    const int64_t row_cells = units * Mode::kCells, row_facts = Rows<Mode>::slabs(units) * Mode::kFacts;
    auto* cells = cells_.of<typename Mode::Cell>(most * row_cells);
    auto* facts = facts_.of<float>(most * row_facts);
    chunks_.clear();
    for (int64_t first = 0; first < rows; first += kChunkRows)
      chunks_.emplace_back(int(std::min<int64_t>(kChunkRows, rows - first)), units, cells + first * row_cells, facts + first * row_facts);
  }
  int chunks() const { return int(chunks_.size()); }
  const Rows<Mode>& chunk(int i) const { return chunks_[i]; }
  DW_INLINE void put(int64_t row, int unit, F first, F second) const {
    chunks_[row / kChunkRows].put(int(row % kChunkRows), unit, first, second);
  }
  DW_INLINE void put(int64_t row, int unit, F values) const { chunks_[row / kChunkRows].put(int(row % kChunkRows), unit, values); }

 private:
  Buffer cells_, facts_;
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
// Defined in tiles.h, which takes long to compile: once for each mode, in tiles_bf16.cpp, tiles_fp32.cpp and tiles_int8.cpp.
template <class Mode>
void tile_product(const Weights& w, const Rows<Mode>& x, int tile, F* total);

}  // namespace dw
