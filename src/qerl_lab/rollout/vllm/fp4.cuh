// Types, the parts of y, and the barrier of a launch's blocks.
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

// Return the part of y (e.g. q, k, v) that contains column n.
template <typename Shape>
__device__ int part_of(const Shape& s, int n) { return (n >= s.part_1) + (n >= s.part_2); }

// Barrier of all blocks by a counter. Each block adds 1; the first adds so much that the highest bit flips once all have
// arrived. So no launch has to zero the counter for the next.
__device__ u64 arrived(u64* counter, u32 blocks, bool first) {  // returns the old value
  return released(counter, first ? (1ull << 63) - (blocks - 1) : 1ull);
}

__device__ void await(const u64* counter, u64 before) {
  while ((acquired(counter) ^ before) >> 63 == 0) pause();
}
