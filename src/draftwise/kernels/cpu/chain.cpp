// A chain of guesses in one call: a draft reads the committed rows that are new to it, its head guesses, the guess is read as a
// row of its own, and so on for as long as a further guess promises more than it costs.
#include <chrono>
#include <vector>

#include "decoder.h"

using namespace dw;

extern "C" {
void draftwise_decoder_run(void* decoder, const Pass* pass);
void draftwise_matmul(const Weights* w, const void* x, int x_is_bf16, int64_t n, void* y, int y_is_bf16, int as_bf16,
                      const int64_t* places, int64_t width);
int64_t draftwise_draw(const float* logits, const int64_t* tokens, int64_t count, float temperature, uint64_t key, int64_t most,
                       double* times, int64_t* found);
int64_t draftwise_largest(const float* logits, int64_t rows, int64_t count, int64_t most, float* values, int64_t* found,
                          double* mass);
}

namespace {

struct Chain {
  const Weights* head;
  const int64_t* tokens;  // what its outputs are of, ascending; null: 0 and up
  int64_t known;          // outputs that may be guessed
  int64_t as_bf16;        // as of draftwise_matmul
  int64_t layers;         // of the draft
  int64_t depth;          // most guesses
  // temperature 0: the likeliest is guessed; else the first to arrive under the noise of `keys`, one a guess
  double temperature;
  const uint64_t* keys;
  // A guess of confidence c, in class k by `edges`, is right with a chance of base[k] + slope[k] * c once all above it are.
  const double *edges, *base, *slope;
  int64_t classes;
  double next;  // the chance of a guess that was not made yet
  double least_confidence, node_price, level_price;
  // what comes of it
  float* handed;  // [rows read + depth - 1, stride]: what each row hands on
  int64_t* guesses;
  double* confidences;
  double later;  // seconds that guesses after the first took
};

constexpr int kArrivals = 4;  // whose speeds tell how sure the first one is

struct Guess {
  int64_t token;
  double confidence;  // below 0: the logits have no meaning
};

Guess guess(const Chain& chain, const float* logits, int64_t depth) {
  if (chain.temperature > 0) {
    double times[kArrivals], all = 0;
    int64_t found[kArrivals];
    const int64_t held =
        draftwise_draw(logits, chain.tokens, chain.known, float(chain.temperature), chain.keys[depth], kArrivals, times, found);
    for (int64_t i = 0; i < held; ++i) all += 1 / std::max(times[i], 1e-30);
    return held > 0 ? Guess{found[0], 1 / std::max(times[0], 1e-30) / all} : Guess{0, -1};
  }
  float value;
  int64_t at;
  double mass;
  if (!draftwise_largest(logits, 1, chain.known, 1, &value, &at, &mass)) return {0, -1};
  return {chain.tokens ? chain.tokens[at] : at, 1 / mass};
}

double chance(const Chain& chain, double confidence) {
  int64_t k = 0;
  while (k < chain.classes - 1 && chain.edges[k] <= confidence) ++k;
  return chain.base[k] + chain.slope[k] * confidence;
}

using Clock = std::chrono::steady_clock;

// Returns how many guesses there are; `first` is when the first one was there.
int64_t grow(void* decoder, const Pass* pass, const Chain* chain, Clock::time_point* first) {
  static thread_local Buffer buffer;
  float* logits = buffer.of<float>(chain->head->out);
  std::vector<float*> taps(chain->layers + 1, nullptr);
  Pass now = *pass;
  Span span = *pass->span;
  now.span = &span;
  now.taps = taps.data();
  const int64_t width = pass->stride / 2;
  double reach = 1;
  for (int64_t made = 0, row = 0;; row = pass->rows + made - 1) {
    if (made) {
      now.rows = 1;
      now.tokens = pass->tokens + row, now.positions = pass->positions + row, now.pool_places = pass->pool_places + row;
      now.features = nullptr;
      now.inputs = chain->handed + (row - 1) * pass->stride;
      span.start = 0, span.stop = 1, span.staged = pass->span->staged + made;
    }
    taps[chain->layers] = chain->handed + row * pass->stride;
    now.normed = taps[chain->layers] + width;
    draftwise_decoder_run(decoder, &now);
    const float* last = now.normed + (now.rows - 1) * pass->stride;
    draftwise_matmul(chain->head, last, 0, 1, logits, 0, int(chain->as_bf16), nullptr, chain->head->out);
    const Guess found = guess(*chain, logits, made);
    if (!made) *first = Clock::now();
    if (found.confidence < 0) return made;
    chain->guesses[made] = found.token;
    chain->confidences[made] = found.confidence;
    reach *= chance(*chain, found.confidence);
    if (++made == chain->depth || found.confidence < chain->least_confidence) return made;
    if (!(reach * chain->next - chain->node_price > chain->level_price)) return made;
    const_cast<int64_t*>(pass->tokens)[pass->rows + made - 1] = found.token;
  }
}

}  // namespace

extern "C" int64_t draftwise_sizeof_chain() { return sizeof(Chain); }

// pass: one span's committed rows, unread so far. Its tokens, positions and pool_places go on for the depth - 1 rows of guesses,
// where these are put among the tokens. Returns how many guesses there are.
extern "C" int64_t draftwise_decoder_chain(void* decoder, const Pass* pass, Chain* chain) {
  Clock::time_point first;
  const int64_t made = grow(decoder, pass, chain, &first);
  chain->later = std::chrono::duration<double>(Clock::now() - first).count();
  return made;
}
