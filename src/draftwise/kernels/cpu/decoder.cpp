#include "decoder.h"

using namespace dw;

namespace {

struct Handle {
  virtual ~Handle() = default;
  virtual void run(const Pass& pass) = 0;
};

template <class Mode, class T>
struct Of : Handle {
  Decoder<Mode, T> decoder;
  explicit Of(const DecoderWeights& weights) : decoder(weights) {}
  void run(const Pass& pass) override { decoder.run(pass); }
};

bool all_in_bytes(const DecoderWeights& decoder) {
  if (decoder.hidden % 32 || decoder.head_dim % 32 || decoder.inner % 32) return false;
  if (const Weights* w = decoder.condense; w && (w->in % 32 || !w->as_bytes)) return false;
  for (int l = 0; l < decoder.layers; ++l) {
    const LayerWeights& layer = decoder.layer[l];
    for (const Weights* w : {layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down})
      if (w && !w->as_bytes) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int64_t draftwise_sizeof_pass() { return sizeof(Pass); }

void* draftwise_decoder(const DecoderWeights* weights) {
  if (!weights->pool_is_bf16) return new Of<Fp32Mode, float>(*weights);
  if constexpr (kHasBytes)
    if (all_in_bytes(*weights)) return new Of<Int8Mode, uint16_t>(*weights);
  if constexpr (kHasBf16)
    return new Of<Bf16Mode, uint16_t>(*weights);
  else
    return new Of<Fp32Mode, uint16_t>(*weights);
}

void draftwise_decoder_free(void* decoder) { delete static_cast<Handle*>(decoder); }

void draftwise_decoder_run(void* decoder, const Pass* pass) { static_cast<Handle*>(decoder)->run(*pass); }

}  // extern "C"
