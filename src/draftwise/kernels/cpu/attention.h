// Attention of the rows of a pass over the pages of their slots.
//
// A row's keys stand in the order of their positions: committed rows through the block table, then the row's own staged
// ancestors. Keys are taken in blocks of 128 positions; a block's softmax is whole, and blocks are merged in order. So a
// row adds in one order whether it is fed alone, in a prompt, or as a node of any tree.
#pragma once

#include <vector>

#include "attention_tiles.h"
#include "matmul.h"

namespace dw {

constexpr int kPage = 16;       // cache rows
constexpr int kBlockPages = 8;  // pages whose softmax is one
constexpr int kBlockKeys = kPage * kBlockPages;
constexpr int kMostQueries = kLanes == 16 ? 6 : 4;  // query rows in registers
constexpr int kMostLanes = kLanes == 16 ? 4 : 1;    // vectors of keys, or of head channels, beside them
constexpr int kTileQueries = 48;                    // query rows that share keys brought into shape

struct Span {  // one slot's rows in a pass
  int64_t start, stop, committed, staged;
  const int64_t* pages;      // block table, to cover committed + staged
  const uint8_t* visible;    // [rows, staged], or null for a chain
  const int64_t* positions;  // of the staged rows, where visible is given
};

// Where the keys of the pass's rows lie, worked out once for all layers.
class Paths {
 public:
  void lay_out(const Span* spans, int count, int64_t rows) {
    positions_.assign(rows, 0);
    tails_.assign(rows, {});
    for (int s = 0; s < count; ++s) {
      const Span& span = spans[s];
      const int64_t fed = span.stop - span.start;
      for (int64_t r = 0; r < fed; ++r) {
        int64_t& position = positions_[span.start + r];
        if (!span.visible) {
          position = span.committed + span.staged - fed + r;
          continue;
        }
        position = span.positions[span.staged - fed + r];
        // pool rows from the first page that is not all committed, by position
        std::vector<int64_t>& tail = tails_[span.start + r];
        const int64_t first = span.committed / kPage * kPage;
        tail.resize(position + 1 - first);
        for (int64_t p = first; p < span.committed; ++p) tail[p - first] = pool_row(span, p);
        const uint8_t* sees = span.visible + r * span.staged;
        for (int64_t i = 0; i < span.staged; ++i)
          if (sees[i]) tail[span.positions[i] - first] = pool_row(span, span.committed + i);
      }
    }
  }
  int64_t position(int64_t row) const { return positions_[row]; }
  const std::vector<int64_t>& tail(int64_t row) const { return tails_[row]; }

  static int64_t pool_row(const Span& span, int64_t index) { return span.pages[index / kPage] * kPage + index % kPage; }

 private:
  std::vector<int64_t> positions_;
  std::vector<std::vector<int64_t>> tails_;
};

// acc[r][c] += lanes (c, p) times pair (r, p), over pairs in order.
template <class Mode, int R, int C>
DW_INLINE void multiply(const uint8_t* lanes, int64_t lane_step, int64_t pair_step, const typename Mode::Cell* x, int64_t stride,
                        int pairs, F (&acc)[R][C]) {
  for (int p = 0; p < pairs; ++p, lanes += pair_step, ++x) {
    if constexpr (std::is_same_v<Mode, Bf16Mode>) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
      U w[C];
      for (int c = 0; c < C; ++c) w[c] = load((const uint32_t*)(lanes + c * lane_step));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const U b = splat(x[r * stride]);
        for (int c = 0; c < C; ++c) acc[r][c] = dot_bf16(acc[r][c], w[c], b);
      }
#endif
    } else {
      F even[C], odd[C];
      for (int c = 0; c < C; ++c) {
        even[c] = load((const float*)(lanes + c * lane_step));
        odd[c] = load((const float*)(lanes + c * lane_step) + 16);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F a = splat(x[r * stride].even), b = splat(x[r * stride].odd);
        for (int c = 0; c < C; ++c) acc[r][c] = fma(odd[c], b, fma(even[c], a, acc[r][c]));
      }
    }
  }
}

// Sixteen pairs of a lane vector each: `rows` as 32-bit words, turned so that word w of row j is lane j of vector w.
DW_INLINE void transpose16(const uint32_t* const* rows, int at, uint8_t* to, int64_t step) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) a[j] = _mm512_loadu_si512(rows[j] + at);
#pragma GCC unroll 8
  for (int j = 0; j < 16; j += 2) {
    b[j] = _mm512_unpacklo_epi32(a[j], a[j + 1]);
    b[j + 1] = _mm512_unpackhi_epi32(a[j], a[j + 1]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 16; j += 4) {
    a[j] = _mm512_unpacklo_epi64(b[j], b[j + 2]);
    a[j + 1] = _mm512_unpackhi_epi64(b[j], b[j + 2]);
    a[j + 2] = _mm512_unpacklo_epi64(b[j + 1], b[j + 3]);
    a[j + 3] = _mm512_unpackhi_epi64(b[j + 1], b[j + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    b[j] = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88);
    b[j + 4] = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
    b[j + 8] = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
    b[j + 12] = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm512_storeu_si512(to + j * step, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
    _mm512_storeu_si512(to + (j + 4) * step, _mm512_shuffle_i32x4(b[j + 4], b[j + 12], 0x88));
    _mm512_storeu_si512(to + (j + 8) * step, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
    _mm512_storeu_si512(to + (j + 12) * step, _mm512_shuffle_i32x4(b[j + 4], b[j + 12], 0xdd));
  }
#else
  for (int w = 0; w < 16; ++w)
    for (int j = 0; j < 16; ++j) ((uint32_t*)(to + w * step))[j] = rows[j][at + w];
#endif
}

DW_INLINE F load_channels(const uint16_t* p) { return load_bf16(p); }
DW_INLINE F load_channels(const float* p) { return load(p); }
DW_INLINE float channel(const uint16_t* p) { return from_bf16(*p); }
DW_INLINE float channel(const float* p) { return *p; }

template <class Mode, class T>  // T: an element of the pool, uint16_t for bfloat16
class Attention {
 public:
  using Pair = typename Mode::Cell;
  static constexpr int kLaneBytes = Mode::kExpanded == kBf16 ? 64 : 128;

  int heads, kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
  const T *keys, *values;  // this layer's, [kv heads, pool rows, head_dim]
  int64_t pool_rows;
  const Pair* queries;  // [rows, heads, head_dim / 2]
  const Paths* paths;

  struct Tile {  // rows of one span that share keys brought into shape
    const Span* span;
    int64_t first;
    int rows;
  };

  static constexpr bool kTiles = kHasTiles && std::is_same_v<Mode, Bf16Mode> && sizeof(T) == 2;
  bool tiled() const { return kTiles && head_dim % kTileDims == 0 && head_dim <= 4 * kTileDims; }

  int group() const { return heads / kv_heads; }
  int most_queries() const { return tiled() ? kTileRows : kMostQueries; }
  int parts() const { return (group() + most_queries() - 1) / most_queries(); }  // query blocks a row's heads take
  int part() const { return (group() + parts() - 1) / parts(); }
  int rows_per_tile() const { return std::max(1, kTileQueries / group()); }
  int rows_per_block() const { return parts() > 1 ? 1 : most_queries() / group(); }
  // Query slots of a tile: blocks of equal height, each of whole rows or of a part of one.
  int row_blocks(const Tile& tile) const { return (tile.rows + rows_per_block() - 1) / rows_per_block(); }
  int rows_in_block(const Tile& tile) const { return (tile.rows + row_blocks(tile) - 1) / row_blocks(tile); }
  int height(const Tile& tile) const { return parts() > 1 ? part() : rows_in_block(tile) * group(); }
  int blocks(const Tile& tile) const { return row_blocks(tile) * parts(); }
  int most_slots() const { return (std::max(rows_per_tile() + rows_per_block(), 1) * parts() * part() + 15) / 16 * 16; }
  int slot(const Tile& tile, int row, int head) const {
    if (parts() > 1) return (row * parts() + head / part()) * part() + head % part();
    return row / rows_in_block(tile) * height(tile) + row % rows_in_block(tile) * group() + head;
  }

  // Blocks of keys that some row of the tile sees: [first, last).
  int first_block(const Tile& tile) const {
    if (!window) return 0;
    int64_t least = paths->position(tile.first);
    for (int r = 1; r < tile.rows; ++r) least = std::min(least, paths->position(tile.first + r));
    return int(std::max<int64_t>(0, least - window + 1) / kBlockKeys);
  }
  int last_block(const Tile& tile) const {
    int64_t most = 0;
    for (int r = 0; r < tile.rows; ++r) most = std::max(most, paths->position(tile.first + r));
    return int(most / kBlockKeys) + 1;
  }

  // Softmax state of a tile's slots: largest score, sum of weights, weighted sum of values [slots][head_dim], its channels in
  // an order of their own until `finish`.
  struct State {
    float *largest, *total, *sum;
  };
  int64_t state_floats() const { return int64_t(most_slots()) * (head_dim + 2); }
  State state(float* memory) const { return {memory + most_slots() * head_dim, memory + most_slots() * (head_dim + 1), memory}; }

  void begin(const State& s, int slots) const {
    for (int i = 0; i < (slots + 15) / 16 * 16; ++i) s.largest[i] = -INFINITY, s.total[i] = 0;
    std::memset(s.sum, 0, sizeof(float) * slots * head_dim);
  }

  void finish(const State& s, int slots) const {
#if defined(__AMX_BF16__)
    if (tiled())
      for (int i = 0; i < slots; ++i) in_order(s.sum + int64_t(i) * head_dim, head_dim);
#endif
  }

  // Add a later block to a running state.
  void merge(const State& into, const State& block, int slots) const {
    for (int first = 0; first < slots; first += 16) {
      const F a = load(into.largest + first), b = load(block.largest + first), largest = max(a, b);
      const F base = max(largest, splat(-3e38f));  // where neither has seen a key, both weigh nothing
      float old[16], now[16];
      store(old, exp(a - base));
      store(now, exp(b - base));
      store(into.largest + first, largest);
      store(into.total + first, load(into.total + first) * load(old) + load(block.total + first) * load(now));
      for (int i = 0; i < std::min(16, slots - first); ++i) {
        if (now[i] == 0) continue;
        const int64_t at = int64_t(first + i) * head_dim;
        const F before = splat(old[i]), share = splat(now[i]);
        for (int d = 0; d < head_dim; d += 16)
          store(into.sum + at + d, load(into.sum + at + d) * before + load(block.sum + at + d) * share);
      }
    }
  }

  // Scratch of one thread.
  struct Scratch {
    Buffer lanes, queries, gathered, scores, weights, running;
  };

  // The tile's queries of a key head: [slots][head_dim / 2].
  const Pair* arrange(const Tile& tile, int kv_head, Scratch& scratch) const {
    const int pairs = head_dim / 2, height = this->height(tile), count = blocks(tile);
    Pair* to = scratch.queries.template of<Pair>(int64_t(count) * height * pairs);
    std::memset((void*)to, 0, sizeof(Pair) * count * height * pairs);
    for (int r = 0; r < tile.rows; ++r)
      for (int g = 0; g < group(); ++g)
        std::memcpy(to + slot(tile, r, g) * pairs, queries + ((tile.first + r) * heads + kv_head * group() + g) * pairs,
                    sizeof(Pair) * pairs);
    return to;
  }

  // One block of keys for a tile and key head; `q` from arrange().
  void attend(const Tile& tile, int kv_head, int block, const Pair* q, const State& out, Scratch& scratch) const {
    const int slots = blocks(tile) * height(tile);
    const Pages pages(*this, tile, kv_head, block);
    F* scores = scratch.scores.template of<F>(int64_t(slots) * kBlockPages);
    if (tiled())
      score_in_tiles(tile, pages, q, scores, scratch);
    else
      score_in_lanes(tile, pages, q, scores, scratch);

    // weights: [slots][pairs of keys]
    Pair* weights = scratch.weights.template of<Pair>(int64_t(slots) * kBlockKeys / 2);
    std::memset((void*)weights, 0, sizeof(Pair) * slots * kBlockKeys / 2);
    for (int i = 0; i < slots; ++i) out.largest[i] = -INFINITY, out.total[i] = 0;
    for (int r = 0; r < tile.rows; ++r)
      for (int g = 0; g < group(); ++g) {
        const int s = slot(tile, r, g);
        weigh(paths->position(tile.first + r), pages.first, scores + int64_t(s) * kBlockPages, out.largest[s], out.total[s],
              weights + int64_t(s) * kBlockKeys / 2);
      }

    std::memset(out.sum, 0, sizeof(float) * slots * head_dim);
    if (tiled())
      add_in_tiles(tile, pages, weights, out.sum);
    else
      add_in_lanes(tile, pages, weights, out.sum, scratch);
  }

 private:
  // A block's pages: [low, high) of them are read by all rows, a tree's later ones by each row for itself.
  struct Pages {
    const Attention& attention;
    const Span& span;
    const T *keys, *values;
    int64_t first, count;  // the block's first page, and the span's pages that are full
    int low, high;

    Pages(const Attention& a, const Tile& tile, int kv_head, int block)
        : attention(a),
          span(*tile.span),
          keys(a.keys + kv_head * a.pool_rows * a.head_dim),
          values(a.values + kv_head * a.pool_rows * a.head_dim),
          first(int64_t(block) * kBlockPages),
          count((span.committed + span.staged) / kPage) {
      int64_t most = 0, least = INT64_MAX;
      for (int r = 0; r < tile.rows; ++r) {
        most = std::max(most, a.paths->position(tile.first + r));
        least = std::min(least, a.paths->position(tile.first + r));
      }
      int64_t end = most / kPage + 1;
      if (tree()) end = std::min(end, span.committed / kPage);
      high = int(std::clamp<int64_t>(end - first, 0, kBlockPages));
      const int64_t seen_from = a.window ? std::max<int64_t>(0, least - a.window + 1) / kPage : 0;
      low = int(std::clamp<int64_t>(seen_from - first, 0, high));
    }

    bool tree() const { return span.visible != nullptr; }
    const T* at(const T* from, int page) const { return from + span.pages[first + page] * kPage * attention.head_dim; }
    // A page that is read soon.
    void fetch(const T* from, int64_t page) const {
      if (first + page < count)
        dw::fetch((const uint8_t*)(from + span.pages[first + page] * kPage * attention.head_dim),
                  kPage * attention.head_dim * int(sizeof(T)));
    }
    // Where a shared page's rows are.
    void rows(const T* from, int page, const T* (&rows)[kPage]) const {
      for (int j = 0; j < kPage; ++j) rows[j] = at(from, page) + int64_t(j) * attention.head_dim;
    }
    // Those of a tree node's own page; where it has none, its first, which the mask hides.
    void own_rows(const T* from, int64_t row, int page, const T* (&rows)[kPage]) const {
      const std::vector<int64_t>& tail = attention.paths->tail(row);
      const int64_t base = (first + page) * kPage - span.committed / kPage * kPage;
      for (int j = 0; j < kPage; ++j) {
        const int64_t at = base + j < int64_t(tail.size()) ? base + j : 0;
        rows[j] = from + tail[at] * attention.head_dim;
      }
    }
    // f(from, to): a tree row's pages in this block beyond the shared ones.
    template <class Function>
    void own(int64_t row, Function f) const {
      const int from = int(std::clamp<int64_t>(span.committed / kPage - first, 0, kBlockPages));
      const int to = int(std::clamp<int64_t>(attention.paths->position(row) / kPage + 1 - first, 0, kBlockPages));
      if (tree() && from < to) f(from, to);
    }
  };

  void score_in_lanes(const Tile& tile, const Pages& pages, const Pair* q, F* scores, Scratch& scratch) const {
    const int height = this->height(tile), pairs = head_dim / 2;
    const int64_t tail_bytes = int64_t(pairs) * kBlockPages * kLaneBytes;
    uint8_t* lanes = scratch.lanes.template of<uint8_t>(2 * tail_bytes);
    const T* rows[kPage];
    for (int page = pages.low; page < pages.high; ++page) {
      pages.fetch(pages.keys, page + 2);
      pages.rows(pages.keys, page, rows);
      turn_keys(rows, lanes + page * pairs * kLaneBytes);
    }
    for (int b = 0; b < blocks(tile); ++b)
      score(q + int64_t(b) * height * pairs, height, lanes, pages.low, pages.high, scores + int64_t(b) * height * kBlockPages);
    for (int r = 0; r < tile.rows; ++r)
      pages.own(tile.first + r, [&](int from, int to) {
        for (int page = from; page < to; ++page) {
          pages.own_rows(pages.keys, tile.first + r, page, rows);
          turn_keys(rows, lanes + tail_bytes + page * pairs * kLaneBytes);
        }
        for_parts(tile, r, [&](int s, int size) {
          score(q + int64_t(s) * pairs, size, lanes + tail_bytes, from, to, scores + int64_t(s) * kBlockPages);
        });
      });
  }

  // values: [pairs of keys][head_dim / 16]
  void add_in_lanes(const Tile& tile, const Pages& pages, const Pair* weights, float* sums, Scratch& scratch) const {
    const int height = this->height(tile);
    const int64_t page_bytes = int64_t(kPage / 2) * (head_dim / 16) * kLaneBytes, tail_bytes = page_bytes * kBlockPages;
    uint8_t* lanes = scratch.lanes.template of<uint8_t>(2 * tail_bytes);
    const T* rows[kPage];
    for (int page = pages.low; page < pages.high; ++page) {
      pages.fetch(pages.values, page + 2);
      pages.rows(pages.values, page, rows);
      pair_values(rows, kPage, lanes + page * page_bytes);
    }
    for (int b = 0; b < blocks(tile); ++b)
      add_values(weights + int64_t(b) * height * kBlockKeys / 2, height, lanes, pages.low, pages.high,
                 sums + int64_t(b) * height * head_dim);
    for (int r = 0; r < tile.rows; ++r)
      pages.own(tile.first + r, [&](int from, int to) {
        for (int page = from; page < to; ++page) {
          pages.own_rows(pages.values, tile.first + r, page, rows);
          pair_values(rows, kPage, lanes + tail_bytes + page * page_bytes);
        }
        for_parts(tile, r, [&](int s, int size) {
          add_values(weights + int64_t(s) * kBlockKeys / 2, size, lanes + tail_bytes, from, to, sums + int64_t(s) * head_dim);
        });
      });
  }

  void score_in_tiles(const Tile& tile, const Pages& pages, const Pair* q, F* scores, Scratch& scratch) const {
#if defined(__AMX_BF16__)
    if constexpr (kTiles) {
      const int height = this->height(tile), steps = head_dim / kTileDims, key_bytes = head_dim * int(sizeof(T));
      const int64_t block_pairs = int64_t(height) * head_dim / 2, block_bytes = int64_t(head_dim / 2) * kLaneBytes;
      uint8_t* turned = scratch.lanes.template of<uint8_t>(blocks(tile) * block_bytes);
      for (int b = 0; b < blocks(tile); ++b) turn_queries(q + b * block_pairs, height, turned + b * block_bytes);
      alignas(64) float products[2][kPage * kTileRows + kTileRows];  // four slots are read where there are fewer
      const auto turn = [&](int page, int first, int size, int in_block) {
        for (int i = 0; i < size; i += 4) {
          F four[4];
          turn_slots(products[page % 2] + in_block + i, four);
          for (int j = 0; j < std::min(4, size - i); ++j)
            scores[int64_t(first + i + j) * kBlockPages + page] = four[j] * splat(scale);
        }
      };
      const Tiles tiles = Tiles::for_scores();
      for (int b = 0; b < blocks(tile) && pages.low < pages.high; ++b) {
        load_queries(turned + b * block_bytes, steps);
        for (int page = pages.low; page < pages.high; ++page) {
          if (b == 0) pages.fetch(pages.values, page);
          key_products(pages.at(pages.keys, page), key_bytes, steps, products[page % 2]);
          if (page > pages.low) turn(page - 1, b * height, height, 0);
        }
        turn(pages.high - 1, b * height, height, 0);
      }
      T* gathered = scratch.gathered.template of<T>(kPage * head_dim);
      const T* rows[kPage];
      for (int r = 0; r < tile.rows; ++r)
        pages.own(tile.first + r, [&](int from, int to) {
          for (int page = from; page < to; ++page) {
            pages.own_rows(pages.keys, tile.first + r, page, rows);
            for (int j = 0; j < kPage; ++j) std::memcpy(gathered + j * head_dim, rows[j], key_bytes);
            for_parts(tile, r, [&](int s, int size) {
              load_queries(turned + s / height * block_bytes, steps);
              key_products(gathered, key_bytes, steps, products[page % 2]);
              turn(page, s, size, s % height);
            });
          }
        });
    }
#endif
  }

  void add_in_tiles(const Tile& tile, const Pages& pages, const Pair* weights, float* sums) const {
#if defined(__AMX_BF16__)
    if constexpr (kTiles) {
      const int height = this->height(tile), count = blocks(tile);
      const int64_t weight_bytes = 2 * kBlockKeys, weights_on = height * weight_bytes, sums_on = int64_t(height) * head_dim * 4;
      const T* rows[kPage];
      // two blocks in 32 channels at a time, or one in 64 where there are as many
      const auto add = [&](auto rows_of, int from, int to, int first, bool two) {
        const void* by = weights + int64_t(first) * kBlockKeys / 2;
        float* here = sums + int64_t(first) * head_dim;
        for (int channel = 0; channel < head_dim;) {
          if (two) {
            value_products<2, 2>(rows_of, from, to, channel, head_dim, by, weight_bytes, weights_on, here, sums_on);
            channel += 32;
          } else if (channel + 64 <= head_dim) {
            value_products<4, 1>(rows_of, from, to, channel, head_dim, by, weight_bytes, 0, here, 0);
            channel += 64;
          } else {
            value_products<2, 1>(rows_of, from, to, channel, head_dim, by, weight_bytes, 0, here, 0);
            channel += 32;
          }
        }
      };
      {
        const Tiles tiles = Tiles::for_values(height);
        const auto shared = [&](int page) {
          pages.fetch(pages.keys, kBlockPages + page);
          pages.rows(pages.values, page, rows);
          return rows;
        };
        for (int b = 0; b < count; b += 2) add(shared, pages.low, pages.high, b * height, b + 1 < count);
      }
      for (int r = 0; r < tile.rows; ++r)
        pages.own(tile.first + r, [&](int from, int to) {
          const auto own = [&](int page) {
            pages.own_rows(pages.values, tile.first + r, page, rows);
            return rows;
          };
          for_parts(tile, r, [&](int s, int size) {
            const Tiles tiles = Tiles::for_values(size);
            add(own, from, to, s, false);
          });
        });
    }
#endif
  }

  template <class Function>
  void for_parts(const Tile& tile, int row, Function f) const {
    for (int g = 0; g < group(); g += part()) f(slot(tile, row, g), std::min(part(), group() - g));
  }

  // A block's queries as [head_dim / 2] lane vectors, one slot a lane; what is beyond the last slot is 0.
  void turn_queries(const Pair* q, int size, uint8_t* to) const {
    static constexpr uint32_t kNone[kPage] = {};
    const uint32_t* rows[kTileRows];
    for (int p = 0; p < head_dim / 2; p += 16) {
      for (int i = 0; i < kTileRows; ++i) rows[i] = i < size ? (const uint32_t*)q + i * (head_dim / 2) + p : kNone;
      transpose16(rows, 0, to + p * kLaneBytes, kLaneBytes);
    }
  }

  // A page of 16 key rows as [head_dim / 2] lane vectors, one key a lane.
  void turn_keys(const T* const* rows, uint8_t* to) const {
    const int pairs = head_dim / 2;
    if constexpr (std::is_same_v<Mode, Bf16Mode> && sizeof(T) == 2) {
      int p = 0;
      for (; p + 16 <= pairs; p += 16) transpose16((const uint32_t* const*)rows, p, to + p * kLaneBytes, kLaneBytes);
      for (; p < pairs; ++p)
        for (int j = 0; j < kPage; ++j) std::memcpy(to + p * kLaneBytes + 4 * j, rows[j] + 2 * p, 4);
    } else if constexpr (std::is_same_v<Mode, Fp32Mode> && sizeof(T) == 4) {
      for (int c = 0; c < head_dim; c += 16) transpose16((const uint32_t* const*)rows, c, to + c * 64, 64);
    } else {
      for (int p = 0; p < pairs; ++p)
        for (int j = 0; j < kPage; ++j) {
          const float even = channel(rows[j] + 2 * p), odd = channel(rows[j] + 2 * p + 1);
          if constexpr (std::is_same_v<Mode, Bf16Mode>) {
            ((uint32_t*)to)[p * 16 + j] = to_bf16(even) | uint32_t(to_bf16(odd)) << 16;
          } else {
            ((float*)to)[p * 32 + j] = even;
            ((float*)to)[p * 32 + 16 + j] = odd;
          }
        }
    }
  }

  // Value rows as pairs of keys, one channel a lane.
  void pair_values(const T* const* rows, int count, uint8_t* to) const {
    for (int j = 0; j < count; j += 2)
      for (int d = 0; d < head_dim; d += 16, to += kLaneBytes) {
        const F even = load_channels(rows[j] + d), odd = load_channels(rows[j + 1] + d);
        if constexpr (std::is_same_v<Mode, Bf16Mode>) {
          if constexpr (sizeof(T) == 2)
            store((uint32_t*)to, bits(even) >> 16 | bits(odd));
          else
            store((uint32_t*)to, to_bf16(even) | to_bf16(odd) << 16);
        } else {
          store((float*)to, even);
          store((float*)to + 16, odd);
        }
      }
  }

  template <class Function>
  static DW_INLINE void by_size(int rows, Function f) {
    switch (rows) {
      case 1: return f(std::integral_constant<int, 1>{});
      case 2: return f(std::integral_constant<int, 2>{});
      case 3: return f(std::integral_constant<int, 3>{});
      case 4: return f(std::integral_constant<int, 4>{});
    }
    if constexpr (kMostQueries > 4) {
      if (rows == 5) return f(std::integral_constant<int, 5>{});
      return f(std::integral_constant<int, 6>{});
    }
  }
  // f(from, C) for runs of at most kMostLanes of [begin, end), C a power of two.
  template <class Function>
  static DW_INLINE void by_lanes(int begin, int end, Function f) {
    int at = begin;
    if constexpr (kMostLanes == 4) {
      for (; at + 4 <= end; at += 4) f(at, std::integral_constant<int, 4>{});
      for (; at + 2 <= end; at += 2) f(at, std::integral_constant<int, 2>{});
    }
    for (; at < end; ++at) f(at, std::integral_constant<int, 1>{});
  }

  // Scores of `size` queries for pages [low, high) of a block, [size][kBlockPages].
  void score(const Pair* q, int size, const uint8_t* lanes, int low, int high, F* scores) const {
    const int pairs = head_dim / 2;
    by_size(size, [&](auto rows) {
      by_lanes(low, high, [&](int page, auto across) {
        constexpr int R = decltype(rows)::value, C = decltype(across)::value;
        F acc[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) acc[r][c] = dw::zero();
        multiply<Mode, R, C>(lanes + int64_t(page) * pairs * kLaneBytes, int64_t(pairs) * kLaneBytes, kLaneBytes, q, pairs, pairs, acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) scores[r * kBlockPages + page + c] = acc[r][c] * splat(scale);
      });
    });
  }

  // Scores of one query to weights exp(score - largest), as they are rounded, and their sum.
  void weigh(int64_t position, int64_t first_page, F* scores, float& largest, float& total, Pair* weights) const {
    const int64_t from = window ? std::max<int64_t>(0, position - window + 1) : 0;
    const int low = int(std::clamp<int64_t>(from / kPage - first_page, 0, kBlockPages));
    const int high = int(std::clamp<int64_t>(position / kPage + 1 - first_page, 0, kBlockPages));
    if (low >= high) return;
    F most = splat(-INFINITY);
    for (int page = low; page < high; ++page) {
      const int64_t start = (first_page + page) * kPage;
      if (start < from || start + kPage - 1 > position) {
        float v[16];
        store(v, scores[page]);
        for (int j = 0; j < kPage; ++j)
          if (start + j < from || start + j > position) v[j] = -INFINITY;
        scores[page] = load(v);
      }
      most = max(most, scores[page]);
    }
    largest = dw::largest(most);
    F sum = dw::zero();
    for (int page = low; page < high; ++page)
      sum = sum + put_pairs<Mode>(weights + page * (kPage / 2), exp(scores[page] - splat(largest)));
    total = dw::sum(sum);
  }

  // sum [size][head_dim] += weights times the values of pages [low, high).
  void add_values(const Pair* weights, int size, const uint8_t* lanes, int low, int high, float* sum) const {
    const int chunks = head_dim / 16;
    const int64_t page_bytes = int64_t(kPage / 2) * chunks * kLaneBytes;
    by_size(size, [&](auto rows) {
      by_lanes(0, chunks, [&](int chunk, auto across) {
        constexpr int R = decltype(rows)::value, C = decltype(across)::value;
        F acc[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) acc[r][c] = load(sum + r * head_dim + (chunk + c) * 16);
        multiply<Mode, R, C>(lanes + low * page_bytes + chunk * kLaneBytes, kLaneBytes, int64_t(chunks) * kLaneBytes,
                             weights + low * (kPage / 2), kBlockKeys / 2, (high - low) * (kPage / 2), acc);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < C; ++c) store(sum + r * head_dim + (chunk + c) * 16, acc[r][c]);
      });
    });
  }
};

}  // namespace dw
