// Types, the parts of y, and how the blocks of a launch meet.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#ifdef __CUDACC__
#include "hopper.cuh"
#else
#include "cuda_on_cpu.h"
#endif

__device__ float widened(u32 number) { return __uint_as_float(number << 16); }

// The part of y (q, k or v, say) that column n lies in.
template <typename Shape>
__device__ int part_of(const Shape& s, int n) { return (n >= s.part_1) + (n >= s.part_2); }

// Blocks meet by a counter. Each adds 1, but the first so much that the highest bit turns when all have come: no launch has
// to leave zeros for the next.
__device__ u64 arrived(u64* counter, u32 blocks, bool first) {  // what the counter was
  return released(counter, first ? (1ull << 63) - (blocks - 1) : 1ull);
}

__device__ void await(const u64* counter, u64 before) {
  while ((acquired(counter) ^ before) >> 63 == 0) pause();
}
