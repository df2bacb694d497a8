// Export the kernel's variants as one library function, for tests.
#include "fp4_tiles.cu"

// Rows of x, blocks of a tile, groups, and whether a tile is shared.
#define BOTH(DO, ROWS, TILE, GROUPS) DO(ROWS, TILE, GROUPS, 0) DO(ROWS, TILE, GROUPS, 1)
#define VARIANTS(DO) \
  BOTH(DO, 16, 2, 2) BOTH(DO, 16, 3, 3) BOTH(DO, 16, 8, 2) BOTH(DO, 32, 2, 2) BOTH(DO, 32, 4, 3) BOTH(DO, 64, 2, 2) \
  BOTH(DO, 64, 3, 3) BOTH(DO, 64, 4, 3) BOTH(DO, 64, 5, 3)
VARIANTS(FP4_TILES)

#define CALL(ROWS, TILE, GROUPS, SHARED) \
  if (rows == ROWS && tile == TILE && (s->pieces > 1) == SHARED) \
    return run(blocks, Memory<ROWS, TILE, GROUPS>::THREADS, shared_bytes, [=] { \
      fp4_tiles_##ROWS##_##TILE##_##GROUPS##_##SHARED( \
          maps[0], maps[1], (const u16*)p[0], (const u8*)p[1], (const float*)p[2], (const u16*)p[3], (const u16*)p[4], \
          (const u16*)p[5], (u16*)p[6], (float*)p[7], (u16*)p[8], (float4*)p[9], (u64*)p[10], *s); \
    });

extern "C" void launch(int rows, int tile, int blocks, int shared_bytes, const TensorMap* maps, const void* const* p,
                       const Shape* s) {
  VARIANTS(CALL)
  abort();
}
