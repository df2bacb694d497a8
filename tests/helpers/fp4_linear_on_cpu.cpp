// The kernel as a function of a library, for tests.
#include "fp4_linear.cu"

extern "C" void launch(int blocks, int threads, int shared_bytes, const void* const* p, const Shape* s) {
  run(blocks, threads, shared_bytes, [=] {
    fp4_linear((const u16*)p[0], (const u8*)p[1], (const u8*)p[2], (const float*)p[3], (const u16*)p[4], (const u16*)p[5],
               (const u16*)p[6], (u16*)p[7], (float*)p[8], (float*)p[9], (u64*)p[10], *s);
  });
}
