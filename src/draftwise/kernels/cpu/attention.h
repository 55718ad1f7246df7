// Attention of the rows of a pass over the pages of their slots.
//
// A row's keys stand in the order of their positions: committed rows through the block table, then the row's own staged
// ancestors. Keys are taken in blocks of 128 positions; a block's softmax is whole, and blocks are merged in order. So a
// row adds in one order whether it is fed alone, in a prompt, or as a node of any tree.
#pragma once

#include <vector>

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

  int group() const { return heads / kv_heads; }
  int parts() const { return (group() + kMostQueries - 1) / kMostQueries; }  // query blocks a row's heads take
  int part() const { return (group() + parts() - 1) / parts(); }
  int rows_per_tile() const { return std::max(1, kTileQueries / group()); }
  int rows_per_block() const { return parts() > 1 ? 1 : kMostQueries / group(); }
  // Query slots of a tile: blocks of equal height, each of whole rows or of a part of one.
  int height(const Tile& tile) const { return parts() > 1 ? part() : std::min(tile.rows, rows_per_block()) * group(); }
  int blocks(const Tile& tile) const {
    return parts() > 1 ? tile.rows * parts() : (tile.rows + rows_per_block() - 1) / rows_per_block();
  }
  int most_slots() const { return (std::max(rows_per_tile() + rows_per_block(), 1) * parts() * part() + 15) / 16 * 16; }
  int slot(const Tile& tile, int row, int head) const {
    if (parts() > 1) return (row * parts() + head / part()) * part() + head % part();
    return row / rows_per_block() * height(tile) + row % rows_per_block() * group() + head;
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

  // Softmax state of a tile's slots: largest score, sum of weights, weighted sum of values [slots][head_dim].
  struct State {
    float *largest, *total, *sum;
  };
  int64_t state_floats() const { return int64_t(most_slots()) * (head_dim + 2); }
  State state(float* memory) const { return {memory + most_slots() * head_dim, memory + most_slots() * (head_dim + 1), memory}; }

  void begin(const State& s) const {
    for (int i = 0; i < most_slots(); ++i) s.largest[i] = -INFINITY, s.total[i] = 0;
    std::memset(s.sum, 0, sizeof(float) * most_slots() * head_dim);
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
    Buffer lanes, queries, scores, weights, own, running;
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
    const int height = this->height(tile), count = blocks(tile), slots = count * height, pairs = head_dim / 2;
    const int64_t first_page = int64_t(block) * kBlockPages;
    const Span& span = *tile.span;
    const bool tree = span.visible != nullptr;
    // pages [low, high) of the block are read by all rows, a tree's later ones by each row for itself
    int64_t most = 0, least = INT64_MAX;
    for (int r = 0; r < tile.rows; ++r) {
      most = std::max(most, paths->position(tile.first + r));
      least = std::min(least, paths->position(tile.first + r));
    }
    int64_t end = most / kPage + 1;
    if (tree) end = std::min(end, span.committed / kPage);
    const int high = int(std::clamp<int64_t>(end - first_page, 0, kBlockPages));
    const int64_t seen_from = window ? std::max<int64_t>(0, least - window + 1) / kPage : 0;
    const int low = int(std::clamp<int64_t>(seen_from - first_page, 0, high));

    F* scores = scratch.scores.template of<F>(int64_t(slots) * kBlockPages);
    const int64_t tail_bytes = int64_t(pairs) * kBlockPages * kLaneBytes;
    uint8_t* lanes = scratch.lanes.template of<uint8_t>(2 * tail_bytes);
    const T* keys = this->keys + kv_head * pool_rows * head_dim;
    const T* values = this->values + kv_head * pool_rows * head_dim;
    const T* rows[kPage];
    const int64_t whole_pages = (span.committed + span.staged) / kPage;

    const auto shared_rows = [&](const T* from, int page) {
      const T* first = from + span.pages[first_page + page] * kPage * head_dim;
      for (int j = 0; j < kPage; ++j) rows[j] = first + int64_t(j) * head_dim;
      const int64_t later = first_page + page + 2;
      if (later < whole_pages) fetch((const uint8_t*)(from + span.pages[later] * kPage * head_dim), kPage * head_dim * int(sizeof(T)));
    };
    // rows of a tree node's own page; where it has none, its first, which the mask hides
    const auto own_rows = [&](const T* from, int64_t row, int page) {
      const std::vector<int64_t>& tail = paths->tail(row);
      const int64_t base = (first_page + page) * kPage - span.committed / kPage * kPage;
      for (int j = 0; j < kPage; ++j) {
        const int64_t at = base + j < int64_t(tail.size()) ? base + j : 0;
        rows[j] = from + tail[at] * head_dim;
      }
    };
    const auto own_pages = [&](int64_t row, auto f) {  // a tree row's pages in this block beyond the shared ones
      const int from = int(std::clamp<int64_t>(span.committed / kPage - first_page, 0, kBlockPages));
      const int to = int(std::clamp<int64_t>(paths->position(row) / kPage + 1 - first_page, 0, kBlockPages));
      if (from < to) f(from, to);
    };

    // scores
    for (int page = low; page < high; ++page) {
      shared_rows(keys, page);
      turn_keys(rows, lanes + page * pairs * kLaneBytes);
    }
    for (int b = 0; b < count; ++b)
      score(q + int64_t(b) * height * pairs, height, lanes, low, high, scores + int64_t(b) * height * kBlockPages);
    if (tree)
      for (int r = 0; r < tile.rows; ++r)
        own_pages(tile.first + r, [&](int from, int to) {
          for (int page = from; page < to; ++page) {
            own_rows(keys, tile.first + r, page);
            turn_keys(rows, lanes + tail_bytes + page * pairs * kLaneBytes);
          }
          for_parts(tile, r, [&](int s, int size) {
            score(q + int64_t(s) * pairs, size, lanes + tail_bytes, from, to, scores + int64_t(s) * kBlockPages);
          });
        });

    // weights: [slots][pairs of keys]
    Pair* weights = scratch.weights.template of<Pair>(int64_t(slots) * kBlockKeys / 2);
    std::memset((void*)weights, 0, sizeof(Pair) * slots * kBlockKeys / 2);
    for (int i = 0; i < slots; ++i) out.largest[i] = -INFINITY, out.total[i] = 0;
    for (int r = 0; r < tile.rows; ++r)
      for (int g = 0; g < group(); ++g) {
        const int s = slot(tile, r, g);
        weigh(paths->position(tile.first + r), first_page, scores + int64_t(s) * kBlockPages, out.largest[s], out.total[s],
              weights + int64_t(s) * kBlockKeys / 2);
      }

    // values: [pairs of keys][head_dim / 16]
    const int64_t page_bytes = int64_t(kPage / 2) * (head_dim / 16) * kLaneBytes;
    for (int page = low; page < high; ++page) {
      shared_rows(values, page);
      pair_values(rows, kPage, lanes + page * page_bytes);
    }
    std::memset(out.sum, 0, sizeof(float) * slots * head_dim);
    for (int b = 0; b < count; ++b)
      add_values(weights + int64_t(b) * height * kBlockKeys / 2, height, lanes, low, high, out.sum + int64_t(b) * height * head_dim);
    if (tree)
      for (int r = 0; r < tile.rows; ++r)
        own_pages(tile.first + r, [&](int from, int to) {
          for (int page = from; page < to; ++page) {
            own_rows(values, tile.first + r, page);
            pair_values(rows, kPage, lanes + tail_bytes + page * page_bytes);
          }
          for_parts(tile, r, [&](int s, int size) {
            add_values(weights + int64_t(s) * kBlockKeys / 2, size, lanes + tail_bytes, from, to, out.sum + int64_t(s) * head_dim);
          });
        });
  }

 private:
  template <class Function>
  void for_parts(const Tile& tile, int row, Function f) const {
    for (int g = 0; g < group(); g += part()) f(slot(tile, row, g), std::min(part(), group() - g));
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
