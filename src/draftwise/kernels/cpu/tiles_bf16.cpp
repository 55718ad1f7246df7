#include "tiles.h"

namespace dw {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
template void tile_product<Bf16Mode>(const Weights&, const Rows<Bf16Mode>&, int, F*);
#endif
}  // namespace dw
