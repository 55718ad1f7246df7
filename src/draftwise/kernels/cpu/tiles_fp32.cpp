#include "tiles.h"

namespace dw {
template void tile_product<Fp32Mode>(const Weights&, const Rows<Fp32Mode>&, int, F*);
}  // namespace dw
