#include "tiles.h"

namespace dw {
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
template void tile_product<Int8Mode>(const Weights&, const Rows<Int8Mode>&, int, F*);
#endif
}  // namespace dw
