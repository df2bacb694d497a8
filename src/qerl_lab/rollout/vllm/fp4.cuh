// What fp4_linear.cu and fp4_tiles.cu share.
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

// Counters only grow, each launch by one a block: no launch has to leave zeros for the next.
__device__ u64 joined(u64* counter, u32 blocks) {  // what the counter will be when all have arrived
  __threadfence();
  const u64 before = atomicAdd(counter, 1ull);
  return (before / blocks + 1) * blocks;
}

__device__ void await(const u64* counter, u64 all) {
  while (acquired(counter) < all) pause();
}
