// What Python calls. One library is built for each instruction set; every function here is plain C.
#include <type_traits>
#include <vector>

#include "matmul.h"
#include "pack.h"

using namespace dw;

namespace {

constexpr int kChunkRows = 128;  // rows that pass over a weight tile together

template <class Mode>
void matmul(const Weights& w, const void* x, int x_is_bf16, int64_t n, void* y, int y_is_bf16) {
  const int chunks = int((n + kChunkRows - 1) / kChunkRows);
  const int columns = (w.tiles() + kColumns - 1) / kColumns;
  const int threads = double(n) * w.out * w.in < 2e5 ? 1 : draftwise_threads();
  thread_local Buffer pair_buffer, sum_buffer;
  std::vector<Rows<Mode>> rows(chunks);
  const int units = w.units();
  auto* pairs = pair_buffer.of<typename Mode::Pair>(Rows<Mode>::pair_count(n, units));
  auto* sums = sum_buffer.of<float>(n * units);
  for (int c = 0; c < chunks; ++c) {
    const int64_t first = int64_t(c) * kChunkRows;
    rows[c] = {pairs + Rows<Mode>::pair_count(first, units), sums + first * units, int(std::min<int64_t>(kChunkRows, n - first)), units};
  }
  const auto pack = [&](int64_t row) {
    Rows<Mode>& to = rows[row / kChunkRows];
    if (x_is_bf16)
      pack_row(to, int(row % kChunkRows), (const uint16_t*)x + row * w.in, w.in);
    else
      pack_row(to, int(row % kChunkRows), (const float*)x + row * w.in, w.in);
  };
  const bool few = n <= 4;
  if (few)
    for (int64_t row = 0; row < n; ++row) pack(row);
  Stages stages(2, threads);
  fork(threads, [&](int thread) {
    if (!few) stages.run(0, thread, int(n), pack);
    thread_local Buffer totals;
    stages.run(1, thread, chunks * columns, [&](int item) {
      const Rows<Mode>& in = rows[item / columns];
      const int tile = item % columns * kColumns;
      F* total = totals.of<F>(int64_t(in.n) * kColumns);
      TileProduct<Mode>(w, in)(tile, total);
      for (int c = 0; c < kColumns && tile + c < w.tiles(); ++c) {
        const int column = (tile + c) * 16, count = std::min(16, w.out - column);
        for (int r = 0; r < in.n; ++r) {
          F value = total[r * kColumns + c];
          if (w.bias) value = value + load_input(w.bias + column, 0, count);
          const int64_t at = (int64_t(item / columns) * kChunkRows + r) * w.out + column;
          if (count == 16) {
            y_is_bf16 ? store_bf16((uint16_t*)y + at, value) : store((float*)y + at, value);
          } else {
            float v[16];
            store(v, value);
            for (int i = 0; i < count; ++i) y_is_bf16 ? void(((uint16_t*)y)[at + i] = to_bf16(v[i])) : void(((float*)y)[at + i] = v[i]);
          }
        }
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
  all_of(n, [&](int64_t i) {
    unpack_row(*w, rows[i], to + i * w->in);
    return true;
  });
}

// as_bf16: multiply pairs of bfloat16, where the machine has them; x is rounded to them.
void draftwise_matmul(const Weights* w, const void* x, int x_is_bf16, int64_t n, void* y, int y_is_bf16, int as_bf16) {
  if (kHasBf16 && as_bf16 && w->kind != kFp32)
    matmul<Bf16Mode>(*w, x, x_is_bf16, n, y, y_is_bf16);
  else
    matmul<Fp32Mode>(*w, x, x_is_bf16, n, y, y_is_bf16);
}

}  // extern "C"
