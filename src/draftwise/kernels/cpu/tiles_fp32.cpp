#include "tiles.h"

template void dw::tile_product<dw::Fp32Mode>(const Weights&, const Rows<Fp32Mode>&, int, F*);
