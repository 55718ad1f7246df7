#include "matmul.h"

template class dw::TileProduct<dw::Fp32Mode>;
