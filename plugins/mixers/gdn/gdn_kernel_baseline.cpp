// 16-byte vectors: SSE2 on x86-64, NEON on AArch64.
#define GDN_ISA baseline
#define GDN_VECTOR_BYTES 16
#define GDN_TILE_ROWS 6
#define GDN_TILE_VECTORS 2
#include "gdn_kernel_table-inl.h"
