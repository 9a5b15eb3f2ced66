// 24 of 32 registers accumulate, 4 hold the right operand; the left one is broadcast from memory.
#define GDN_ISA avx512
#define GDN_VECTOR_BYTES 64
#define GDN_TILE_ROWS 6
#define GDN_TILE_VECTORS 4
#include "gdn_kernel_table-inl.h"
