// What Python calls. One library is built for each instruction set; every function here is plain C.
#include <type_traits>
#include <vector>

#include "matmul.h"
#include "pack.h"

using namespace dw;

namespace {

struct Result {  // rows of `width` bfloat16 or float; output i of a product stands at places[i], or at i
  void* y;
  int is_bf16;
  const int64_t* places;
  int64_t width;

  DW_INLINE void put(int64_t row, int column, int count, F value) const {
    const int64_t at = row * width + column;
    if (count == 16 && !places) return is_bf16 ? store_bf16((uint16_t*)y + at, value) : store((float*)y + at, value);
    float v[16];
    store(v, value);
    for (int i = 0; i < count; ++i) {
      const int64_t place = places ? row * width + places[column + i] : at + i;
      if (is_bf16)
        ((uint16_t*)y)[place] = to_bf16(v[i]);
      else
        ((float*)y)[place] = v[i];
    }
  }
};

template <class Mode>
void matmul(const Weights& w, const void* x, int x_is_bf16, int64_t n, const Result& result) {
  thread_local Activations<Mode> in;
  const Activations<Mode>& rows = (in.reserve(n, w.in), in);
  const int columns = (w.tiles() + kColumns - 1) / kColumns;
  const int threads = double(n) * w.out * w.in < 2e5 ? 1 : draftwise_threads();
  const auto pack = [&](int64_t row) {
    const auto input = [&](int at) {
      if (at >= w.in) return zero();
      return x_is_bf16 ? load_input((const uint16_t*)x + row * w.in, at, w.in) : load_input((const float*)x + row * w.in, at, w.in);
    };
    for (int unit = 0; unit < w.units(); unit += 2) rows.put(row, unit, input(unit * kUnit), input((unit + 1) * kUnit));
  };
  const bool few = n <= 4;
  if (few)
    for (int64_t row = 0; row < n; ++row) pack(row);
  Stages stages(2, threads);
  fork(threads, [&](int thread) {
    if (!few) stages.run(0, thread, int(n), pack);
    thread_local Buffer totals;
    stages.run(1, thread, rows.chunks() * columns, [&](int item) {
      const Rows<Mode>& in = rows.chunk(item / columns);
      const int tile = item % columns * kColumns;
      F* total = totals.of<F>(int64_t(in.blocks) * in.height * kColumns);
      tile_product<Mode>(w, in, tile, total);
      for (int c = 0; c < kColumns && tile + c < w.tiles(); ++c) {
        const int column = (tile + c) * 16, count = std::min(16, w.out - column);
        const F bias = w.bias ? load(w.bias + column) : zero();
        for (int r = 0; r < in.n; ++r)
          result.put(int64_t(item / columns) * kChunkRows + r, column, count, total[r * kColumns + c] + bias);
      }
    });
  });
}

}  // namespace

extern "C" {

int draftwise_has_bf16() { return kHasBf16; }

int64_t draftwise_sizeof_weights() { return sizeof(Weights); }

void draftwise_plan(Weights* w, const Source* source) { plan(*w, *source); }

void draftwise_fill(const Weights* w, const Source* source, uint8_t* data) { fill(*w, *source, data); }

void draftwise_unpack_rows(const Weights* w, const int64_t* rows, int64_t n, float* to) {
  const auto unpack = [&](int64_t i) {
    unpack_row(*w, rows[i], to + i * w->in);
    return true;
  };
  if (n > 16)
    all_of(n, unpack);
  else
    for (int64_t i = 0; i < n; ++i) unpack(i);
}

int draftwise_has_bytes() { return kHasBytes; }

// as_bf16: multiply pairs of bfloat16, or bytes for weights that say so, where the machine has them; x is rounded to them.
// places: of the outputs in a row of y, which has `width` numbers; null: in their order.
void draftwise_matmul(const Weights* w, const void* x, int x_is_bf16, int64_t n, void* y, int y_is_bf16, int as_bf16,
                      const int64_t* places, int64_t width) {
  const Result result{y, y_is_bf16, places, width};
  if constexpr (kHasBytes)
    if (as_bf16 && w->as_bytes) return matmul<Int8Mode>(*w, x, x_is_bf16, n, result);
  if constexpr (kHasBf16)
    if (as_bf16 && w->kind != kFp32) return matmul<Bf16Mode>(*w, x, x_is_bf16, n, result);
  matmul<Fp32Mode>(*w, x, x_is_bf16, n, result);
}

}  // extern "C"
