// 12 of 16 registers accumulate, 2 hold the right operand, 1 the broadcast left one.
#define GDN_ISA avx2
#define GDN_VECTOR_BYTES 32
#define GDN_TILE_ROWS 6
#define GDN_TILE_VECTORS 2
#include "gdn_kernel_table-inl.h"
