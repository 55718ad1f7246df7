// All layers of a decoder in one call: the threads are entered once and go through the pass stage by stage.
//
// A layer is: norm | query, key, value heads: bias, norm, rotation, keys and values into the pool | attention |
// output projection, added to the residual stream | norm | gate and up, activation | down, added.
// The residual stream and all that is between products is float32.
#pragma once

#include "attention.h"
#include "pack.h"

namespace dw {

struct LayerWeights {  // a part without weights is left out: query null, no attention; gate null, no feed-forward
  const float *input_norm, *feed_norm;  // input null: attention reads the stream as it is
  const float* beside_norm;  // null: none; else attention reads Pass::beside by this norm, and the stream after it
  const float *query_norm, *key_norm;  // null: none
  const Weights *query, *key, *value, *output, *gate, *up, *down;
  int64_t window;  // 0: none
  int64_t index;   // place in the pool
};

struct DecoderWeights {
  int32_t hidden, heads, kv_heads, head_dim, rotary_dim, inner, layers;
  int32_t pool_is_bf16;
  float norm_eps, scale;
  const LayerWeights* layer;
  const float* final_norm;
  const Weights* embedding;
  const Weights* condense;  // null: none; else from Pass::features to where the stream begins
};

struct Pass {
  int64_t rows, spans;
  const int64_t *tokens, *positions, *pool_places;  // per row
  const float* inputs;    // [rows, stride]: where the stream begins; null: at the embedding of the tokens
  const float* const* features;  // taps of another model, [rows, their share of the inputs of `condense`]: or there; null: none
  int64_t feature_count;
  const float* beside;    // [rows, hidden], where a layer reads it; null: the embedding of the tokens
  const float *cosines, *sines;                     // [positions, rotary_dim / 2]
  const Span* span;
  void* pool;  // [layers, 2, kv_heads, pool_rows, head_dim]
  int64_t pool_rows;
  void* final;         // [rows, hidden]: bfloat16 or float, as the mode; null: not wanted
  float* normed;       // [rows, stride]: the same in float, or null
  float* const* taps;  // [layers + 1]: where to leave the residual stream after k layers, [rows, stride], or null
  int64_t stride;      // floats from a row to the next of inputs, normed and taps
  int64_t keys_only;   // stop where the last layer's keys and values are in the pool: nothing else is wanted
};

template <class Mode, class T>
class Decoder {
  using Attends = Attention<typename Mode::Attention, T>;
  using Cell = typename Mode::Attention::Cell;

 public:
  explicit Decoder(const DecoderWeights& weights) : w_(weights) {}

  void run(const Pass& pass) {
    pass_ = &pass;
    const int64_t n = pass.rows;
    const int64_t heads = w_.heads, dim = w_.head_dim;
    x_ = stream_.of<float>(n * w_.hidden + 16);
    queries_ = query_buffer_.of<Cell>(n * heads * dim / 2);
    normed_.reserve(n, w_.hidden);
    if (joins()) joined_.reserve(n, 2 * w_.hidden);
    if (pass.features) condensed_.reserve(n, w_.condense->in);
    beside_ = joins() && !pass.beside ? beside_buffer_.of<float>(n * w_.hidden) : nullptr;
    attended_.reserve(n, int(heads * dim));
    inner_.reserve(n, w_.inner);
    paths_.lay_out(pass.span, int(pass.spans), n);

    Attends attention{};
    attention.heads = w_.heads;
    attention.kv_heads = w_.kv_heads;
    attention.head_dim = w_.head_dim;
    attention.scale = w_.scale;
    attention.pool_rows = pass.pool_rows;
    attention.queries = queries_;
    attention.paths = &paths_;
    tiles_.clear();
    for (int64_t s = 0; s < pass.spans; ++s)
      for (int64_t first = pass.span[s].start; first < pass.span[s].stop; first += attention.rows_per_tile())
        tiles_.push_back({&pass.span[s], first, int(std::min<int64_t>(attention.rows_per_tile(), pass.span[s].stop - first))});

    const int threads = draftwise_threads();
    const int units = int(tiles_.size()) * w_.kv_heads;
    most_blocks_ = 0;
    for (const auto& tile : tiles_) most_blocks_ = std::max(most_blocks_, attention.last_block(tile));
    // few tiles: every block of keys is an item of its own, merged in order by whoever finishes a tile's last
    split_ = units < 4 * threads && most_blocks_ > 1;
    if (split_) partial_ = partial_buffer_.of<float>(units * most_blocks_ * attention.state_floats());
    finished_ = std::vector<std::atomic<int>>(split_ ? units : 0);

    const int per_layer = 7;
    Stages stages(3 + w_.layers * per_layer, threads);
    fork(threads, [&](int thread) {
      thread_local Worker worker;
      int stage = 0;
      stages.run(stage++, thread, int(n), [&](int row) {
        float* x = x_ + int64_t(row) * w_.hidden;
        if (pass.features) {
          std::memset(x, 0, w_.hidden * 4);
          const int width = int(w_.condense->in / pass.feature_count);
          for (int k = 0; k < pass.feature_count; ++k)
            norm(pass.features[k] + int64_t(row) * width, width, nullptr, condensed_, row, k * width / 16);
        } else if (pass.inputs) {
          std::memcpy(x, pass.inputs + row * pass.stride, w_.hidden * 4);
        } else {
          unpack_row(*w_.embedding, pass.tokens[row], x);
        }
        if (beside_) unpack_row(*w_.embedding, pass.tokens[row], beside_ + int64_t(row) * w_.hidden);
      });
      const int columns = (w_.hidden + 16 * kColumns - 1) / (16 * kColumns);
      if (pass.features)
        stages.run(stage++, thread, condensed_.chunks() * columns,
                   [&](int item) { add(*w_.condense, condensed_, item / columns, item % columns * kColumns, worker); });
      int attended = 0;  // layers whose attention was run before
      for (int l = 0; l < w_.layers; ++l) {
        const LayerWeights& layer = w_.layer[l];
        const auto enter = [&](int row, const float* weight, bool first) {
          if (first) tap(row, pass.taps[l]);
          norm(x_ + int64_t(row) * w_.hidden, w_.hidden, weight, normed_, row);
        };
        if (layer.query) {
          Attends here = attention;
          here.window = layer.window;
          here.keys = pool(layer.index, 0);
          here.values = pool(layer.index, 1);
          stages.run(stage++, thread, int(n), [&](int row) {
            if (!layer.beside_norm) return enter(row, layer.input_norm, true);
            tap(row, pass.taps[l]);
            const int64_t at = int64_t(row) * w_.hidden;
            norm((beside_ ? beside_ : pass.beside) + at, w_.hidden, layer.beside_norm, joined_, row);
            norm(x_ + at, w_.hidden, layer.input_norm, joined_, row, w_.hidden / 16);
          });
          const bool ends = pass.keys_only && l == w_.layers - 1;
          const int first_head = ends ? w_.heads : 0, projected = w_.heads + 2 * w_.kv_heads - first_head;
          stages.run(stage++, thread, normed_.chunks() * projected,
                     [&](int item) { project(layer, item / projected, first_head + item % projected, worker); });
          if (ends) return;
          stages.run(stage++, thread, units * (split_ ? most_blocks_ : 1), [&](int item) { attend(here, attended, item, worker); });
          stages.run(stage++, thread, attended_.chunks() * columns,
                     [&](int item) { add(*layer.output, attended_, item / columns, item % columns * kColumns, worker); });
          ++attended;
        }
        if (layer.gate) {
          stages.run(stage++, thread, int(n), [&](int row) { enter(row, layer.feed_norm, !layer.query); });
          const int inner_columns = (w_.inner + 16 * kColumns - 1) / (16 * kColumns);
          stages.run(stage++, thread, normed_.chunks() * inner_columns,
                     [&](int item) { gate(layer, item / inner_columns, item % inner_columns * kColumns, worker); });
          stages.run(stage++, thread, inner_.chunks() * columns,
                     [&](int item) { add(*layer.down, inner_, item / columns, item % columns * kColumns, worker); });
        }
      }
      stages.run(stage++, thread, int(n), [&](int row) {
        tap(row, pass.taps[w_.layers]);
        final_norm(row);
      });
    });
  }

 private:
  struct Worker {  // one thread's scratch
    Buffer totals, more, head, state;
    typename Attends::Scratch attention;
  };

  T* pool(int64_t layer, int which) const {
    return static_cast<T*>(pass_->pool) + (layer * 2 + which) * w_.kv_heads * pass_->pool_rows * w_.head_dim;
  }

  void tap(int64_t row, float* to) const {
    if (to) std::memcpy(to + row * pass_->stride, x_ + row * w_.hidden, w_.hidden * 4);
  }

  bool joins() const {
    for (int l = 0; l < w_.layers; ++l)
      if (w_.layer[l].beside_norm) return true;
    return false;
  }

  float scale_of(const float* x, int width) const {  // 1 / root of the mean square
    F squares[4] = {zero(), zero(), zero(), zero()};
    for (int at = 0; at < width; at += 16) {
      const F v = load_input(x, at, width);
      squares[at / 16 % 4] = fma(v, v, squares[at / 16 % 4]);
    }
    return 1.0f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / width + w_.norm_eps);
  }

  // x normed, or as it is without a weight, into a row of `to` from unit `first`.
  void norm(const float* x, int width, const float* weight, const Activations<Mode>& to, int64_t row, int first = 0) const {
    const F scale = splat(weight ? scale_of(x, width) : 1.0f);
    const auto normed = [&](int at) {
      if (at >= width) return zero();
      const F value = load_input(x, at, width);
      return weight ? value * scale * load_input(weight, at, width) : value;
    };
    for (int at = 0; at < width; at += 32) to.put(row, first + at / 16, normed(at), normed(at + 16));
  }

  void final_norm(int64_t row) const {
    const float* x = x_ + row * w_.hidden;
    const float scale = scale_of(x, w_.hidden);
    for (int i = 0; i < w_.hidden; ++i) {
      const float value = x[i] * scale * w_.final_norm[i];
      if (pass_->normed) pass_->normed[row * pass_->stride + i] = value;
      if (!pass_->final) continue;
      if constexpr (sizeof(T) == 2)
        static_cast<uint16_t*>(pass_->final)[row * w_.hidden + i] = to_bf16(value);
      else
        static_cast<float*>(pass_->final)[row * w_.hidden + i] = value;
    }
  }

  // One head of queries, keys or values for a chunk of rows.
  void project(const LayerWeights& layer, int chunk, int item, Worker& worker) const {
    const int which = item < w_.heads ? 0 : item < w_.heads + w_.kv_heads ? 1 : 2;
    const int head = which == 0 ? item : which == 1 ? item - w_.heads : item - w_.heads - w_.kv_heads;
    const Weights& weights = which == 0 ? *layer.query : which == 1 ? *layer.key : *layer.value;
    const float* head_norm = which == 0 ? layer.query_norm : which == 1 ? layer.key_norm : nullptr;
    const Rows<Mode>& in = (layer.beside_norm ? joined_ : normed_).chunk(chunk);
    const int dim = w_.head_dim, tiles = dim / 16, first_tile = head * tiles;
    F* total = worker.totals.template of<F>(int64_t(in.blocks) * in.height * kColumns);
    float* vector = worker.head.template of<float>(int64_t(in.n) * dim);
    for (int tile = 0; tile < tiles; tile += kColumns) {
      tile_product<Mode>(weights, in, first_tile + tile, total);
      for (int c = 0; c < kColumns && tile + c < tiles; ++c) {
        const F bias = weights.bias ? load(weights.bias + (first_tile + tile + c) * 16) : zero();
        for (int r = 0; r < in.n; ++r) store(vector + int64_t(r) * dim + (tile + c) * 16, total[r * kColumns + c] + bias);
      }
    }
    for (int r = 0; r < in.n; ++r) {
      float* v = vector + int64_t(r) * dim;
      const int64_t row = int64_t(chunk) * kChunkRows + r;
      if (head_norm) {
        const float scale = scale_of(v, dim);
        for (int d = 0; d < dim; ++d) v[d] = v[d] * scale * head_norm[d];
      }
      if (which < 2) rotate(v, pass_->positions[row]);
      if (which == 0) {
        Cell* to = queries_ + (row * w_.heads + head) * (dim / 2);
        for (int d = 0; d < dim; d += 16) put_pairs<typename Mode::Attention>(to + d / 2, load(v + d));
      } else {
        T* to = pool(layer.index, which - 1) + (head * pass_->pool_rows + pass_->pool_places[row]) * dim;
        for (int d = 0; d < dim; d += 16)
          if constexpr (sizeof(T) == 2)
            store_bf16(to + d, load(v + d));
          else
            store(to + d, load(v + d));
      }
    }
  }

  void rotate(float* v, int64_t position) const {
    const int half = w_.rotary_dim / 2;
    const float *cosines = pass_->cosines + position * half, *sines = pass_->sines + position * half;
    for (int i = 0; i < half; ++i) {
      const float a = v[i], b = v[i + half];
      v[i] = a * cosines[i] - b * sines[i];
      v[i + half] = b * cosines[i] + a * sines[i];
    }
  }

  // `before`: layers of this pass whose attention is done
  void attend(const Attends& attention, int before, int item, Worker& worker) {
    const int count = split_ ? most_blocks_ : 1, unit = item / count;
    const auto& tile = tiles_[unit / w_.kv_heads];
    const int kv_head = unit % w_.kv_heads;
    const int first = attention.first_block(tile), last = attention.last_block(tile);
    const int slots = attention.blocks(tile) * attention.height(tile);
    float* running_memory = worker.attention.running.template of<float>(attention.state_floats());
    const auto running = attention.state(running_memory);
    if (!split_) {
      const auto* queries = attention.arrange(tile, kv_head, worker.attention);
      const auto own = attention.state(worker.state.template of<float>(attention.state_floats()));
      attention.begin(running, slots);
      for (int block = first; block < last; ++block) {
        attention.attend(tile, kv_head, block, queries, own, worker.attention);
        attention.merge(running, own, slots);
      }
    } else {
      const int block = item % count;
      const auto part = [&](int b) { return attention.state(partial_ + (int64_t(unit) * count + b) * attention.state_floats()); };
      if (block >= first && block < last)
        attention.attend(tile, kv_head, block, attention.arrange(tile, kv_head, worker.attention), part(block), worker.attention);
      if (finished_[unit].fetch_add(1, std::memory_order_acq_rel) + 1 != count * (before + 1)) return;
      attention.begin(running, slots);
      for (int b = first; b < last; ++b) attention.merge(running, part(b), slots);
    }
    attention.finish(running, slots);
    for (int r = 0; r < tile.rows; ++r)
      for (int g = 0; g < attention.group(); ++g) {
        const int slot = attention.slot(tile, r, g);
        const F whole = splat(running.total[slot]);
        const int unit0 = (kv_head * attention.group() + g) * w_.head_dim / 16;
        const float* sums = running.sum + int64_t(slot) * w_.head_dim;
        if constexpr (std::is_same_v<Mode, Int8Mode>)
          for (int d = 0; d < w_.head_dim; d += 32)
            attended_.put(tile.first + r, unit0 + d / 16, load(sums + d) / whole, load(sums + d + 16) / whole);
        else
          for (int d = 0; d < w_.head_dim; d += 16) attended_.put(tile.first + r, unit0 + d / 16, load(sums + d) / whole);
      }
  }

  // Columns of a product, added to the residual stream.
  void add(const Weights& weights, const Activations<Mode>& from, int chunk, int tile, Worker& worker) const {
    const Rows<Mode>& in = from.chunk(chunk);
    F* total = worker.totals.template of<F>(int64_t(in.blocks) * in.height * kColumns);
    tile_product<Mode>(weights, in, tile, total);
    for (int c = 0; c < kColumns && tile + c < weights.tiles(); ++c) {
      const int column = (tile + c) * 16, count = std::min(16, weights.out - column);
      const F bias = weights.bias ? load(weights.bias + column) : zero();
      for (int r = 0; r < in.n; ++r) {
        float* to = x_ + (int64_t(chunk) * kChunkRows + r) * w_.hidden + column;
        const F value = total[r * kColumns + c] + bias;
        if (count == 16) {
          store(to, load(to) + value);
        } else {
          float v[16];
          store(v, value);
          for (int i = 0; i < count; ++i) to[i] += v[i];
        }
      }
    }
  }

  // silu(gate) * up for some columns.
  void gate(const LayerWeights& layer, int chunk, int tile, Worker& worker) const {
    const Rows<Mode>& in = normed_.chunk(chunk);
    const int64_t size = int64_t(in.blocks) * in.height * kColumns;
    F *gates = worker.totals.template of<F>(size), *ups = worker.more.template of<F>(size);
    tile_product<Mode>(*layer.gate, in, tile, gates);
    tile_product<Mode>(*layer.up, in, tile, ups);
    const bool whole = tile + kColumns <= layer.gate->tiles();
    F gate_bias[kColumns], up_bias[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      gate_bias[c] = layer.gate->bias && (c == 0 || whole) ? load(layer.gate->bias + (tile + c) * 16) : zero();
      up_bias[c] = layer.up->bias && (c == 0 || whole) ? load(layer.up->bias + (tile + c) * 16) : zero();
    }
    for (int r = 0; r < in.n; ++r) {
      F values[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        const F g = gates[r * kColumns + c] + gate_bias[c], u = ups[r * kColumns + c] + up_bias[c];
        // the sigmoid's exponent stays where exp() is defined
        const F sigmoid = splat(1.0f) / (splat(1.0f) + exp(min(zero() - g, splat(87.0f))));
        values[c] = g * sigmoid * u;
      }
      const int64_t row = int64_t(chunk) * kChunkRows + r;
      if constexpr (kColumns == 2)
        inner_.put(row, tile, values[0], values[1]);
      else
        inner_.put(row, tile, values[0]);
    }
  }

  const DecoderWeights w_;
  const Pass* pass_ = nullptr;
  Buffer stream_, query_buffer_, partial_buffer_, beside_buffer_;
  float *x_ = nullptr, *beside_ = nullptr;
  float* partial_ = nullptr;
  Cell* queries_ = nullptr;
  Activations<Mode> normed_, joined_, condensed_, attended_, inner_;
  Paths paths_;
  std::vector<typename Attends::Tile> tiles_;
  std::vector<std::atomic<int>> finished_;
  int most_blocks_ = 0;
  bool split_ = false;
};

}  // namespace dw
