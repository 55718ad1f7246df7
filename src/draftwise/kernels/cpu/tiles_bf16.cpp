#include "tiles.h"

template void dw::tile_product<dw::Bf16Mode>(const Weights&, const Rows<Bf16Mode>&, int, F*);
