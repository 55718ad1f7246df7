#include "matmul.h"

template class dw::TileProduct<dw::Bf16Mode>;
