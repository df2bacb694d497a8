// y[M, N] = x W^T + bias + t B^T for up to ROWS rows, where t = x A^T comes in pieces from the launch before. W is NVFP4,
// in the layout of `pack` in fp4_tiles.py, which compiles this for ROWS, TILE, GROUPS and SHARED and has the why.
//
// A multiprocessor holds one block, which has tiles of W, TILE times 64 rows, or where there are fewer tiles than blocks a
// piece of one tile's columns. A warp, the carrier, has the copy engine bring codes, scales and x into a ring in shared
// memory. GROUPS warpgroups multiply: each unpacks its rows of W into registers, as bfloat16, for a product with x from
// shared memory. A warpgroup stands still while the tensor cores take its products; others unpack then. Three warps add up
// t meanwhile, each block a part of it for all. Where blocks share a tile (SHARED), all leave their sums, and each adds up
// a part of them in one order, so that the same inputs give the same bits.

#include "fp4.cuh"
#ifdef __CUDACC__
#include "wgmma.cuh"
#endif

constexpr int ADDERS = 96, OTHERS = 32 + ADDERS, REGISTERS_OF_OTHERS = 40;
constexpr int BLOCK = 64;                                 // rows of W that a warpgroup multiplies at once
constexpr int DEPTH = 64, AT_A_TIME = 2;  // columns of a block, of x the 128 bytes of a swizzle; blocks of a stage
constexpr int BLOCK_BYTES = 2304, WARP_BYTES = BLOCK_BYTES / 4, CODE_BYTES = 512;
constexpr int PITCH = 48, OUT_BYTES = 16 * PITCH;  // of y on its way out: from row to row, of a warp
constexpr int LOADS = 8;                           // of a thread that are on their way
enum Barrier { ALL, SUMS, ADDED };  // ALL is that of __syncthreads

struct Shape {
  int M, N, R, rank;
  int part_1, part_2;      // first columns of y of the second and third part, N where there are none
  int splits;              // of x A^T
  int depth, pieces;       // stages of a tile; blocks that share it
  int stages, stride_of_t; // of the ring; from row to row of t in shared memory
};

// Where the parts lie in shared memory, and who multiplies.
template <int ROWS, int TILE, int GROUPS>
struct Memory {
  static constexpr int MULTIPLIERS = GROUPS * 128, THREADS = MULTIPLIERS + OTHERS;
  static constexpr int REGISTERS = (65536 - OTHERS * REGISTERS_OF_OTHERS) / MULTIPLIERS / 8 * 8;  // of a thread
  static constexpr int FEW = TILE / GROUPS, MORE = TILE % GROUPS;  // blocks of a group, and groups with one more
  static constexpr int W_BYTES = TILE * BLOCK_BYTES, X_BYTES = ROWS * DEPTH * 2;  // of a block of columns
  u8 *weights, *out;
  u16* t;
  u32 x, full, empty, ready;

  __device__ Memory(const Shape& s, u8* memory) {
    weights = memory + s.stages * AT_A_TIME * X_BYTES;
    u64* const barriers = (u64*)(weights + s.stages * AT_A_TIME * W_BYTES);
    out = (u8*)(barriers + 2 * s.stages + 2), t = (u16*)(out + MULTIPLIERS / 32 * OUT_BYTES);
    x = shared(memory), full = shared(barriers), empty = full + 8 * s.stages, ready = empty + 8 * s.stages;
  }
};

// Of a tile the stages from `first` to `end` are a block's.
struct Span {
  int first, end;
  __device__ Span(const Shape& s) {
    const int piece = blockIdx.x % s.pieces;
    first = s.depth * piece / s.pieces, end = s.depth * (piece + 1) / s.pieces;
  }
};

// Four pairs of weights, times their scales: a[0] and a[2] are of the row with the scale `low`, the others of that with
// `high`. Sign and magnitude go to the places where a bfloat16 number has them that is 2^-126 of theirs.
__device__ void unpack(u32 word, u32 low, u32 high, u32 (&a)[4]) {
  const u32 places = 0x81C081C0u;
  a[0] = times_bf16(word & places, low), a[1] = times_bf16(word << 3 & places, high);
  a[2] = times_bf16(word << 6 & places, low);
  a[3] = times_bf16((word << 1 & 0x80008000u) | (word >> 4 & 0x00C000C0u) | (word >> 5 & 0x01000100u), high);
}

// Scale i of a word, in both halves, times 2^119: `pack` made its exponent count from 2^-9.
__device__ u32 scale_pair(u32 scales, int i) { return __byte_perm(scales, 0, 0x4040 + i * 0x0101) * 16 + 0x76807680u; }

// The carrier: keep the ring full.
template <int ROWS, int TILE, int GROUPS>
__device__ void carry(const TensorMap* x, const u8* packed, const Shape& s, const Memory<ROWS, TILE, GROUPS>& m,
                      int tiles) {
  typedef Memory<ROWS, TILE, GROUPS> M;
  constexpr int X_STAGE = AT_A_TIME * M::X_BYTES, W_STAGE = AT_A_TIME * M::W_BYTES;
  const u32 weights = shared(m.weights);
  const Span span(s);
  int stage = 0, parity = 1;
  for (int tile = blockIdx.x / s.pieces; tile < tiles; tile += gridDim.x)
    for (int k = span.first; k < span.end; k++) {
      const u32 full = m.full + 8 * stage;
      wait(m.empty + 8 * stage, parity);  // the first round finds what no one has used
      arrive_expecting(full, X_STAGE + W_STAGE);
      copy(weights + stage * W_STAGE, packed + ((long long)tile * s.depth + k) * W_STAGE, W_STAGE, full);
      copy_tile(m.x + stage * X_STAGE, x, k * AT_A_TIME, full);
      if (++stage == s.stages) stage = 0, parity ^= 1;
    }
}

// t = x A^T in bfloat16, [M, R]: each block adds up the pieces of a part of it, waits for the others, and takes all.
__device__ void add_up(const float* sums, u16* t, u64* meeting, const Shape& s, u16* own, u32 ready) {
  const int thread = threadIdx.x - (blockDim.x - ADDERS), size = s.M * s.R;
  awaited();
  for (int i = blockIdx.x * ADDERS + thread; i < size; i += gridDim.x * ADDERS) {
    float sum = 0;
    for (int split = 0; split < s.splits; split += LOADS) {
      float one[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; j++) one[j] = split + j < s.splits ? sums[(long long)(split + j) * size + i] : 0;
#pragma unroll
      for (int j = 0; j < LOADS; j++) sum += one[j];
    }
    t[i] = rounded(sum);
  }
  sync(ADDED, ADDERS);
  if (thread == 0) await(meeting, joined(meeting, gridDim.x));
  sync(ADDED, ADDERS);
  for (int i = thread; i < size / 2; i += ADDERS)
    *(u32*)(own + i * 2 / s.R * s.stride_of_t + i * 2 % s.R) = __ldcg((const u32*)t + i);
  arrive(ready);
}

// The warpgroup's rows of W times all of x, the columns of a stage. `weights` are the warp's, `x` is as of `matrix`. `free`
// is the stage before, whose x the tensor cores have read when the second step begins.
template <int ROWS, int TILE, int BLOCKS>
__device__ void multiply(float (&sum)[BLOCKS][ROWS / 2], const u8* weights, u32 x, u32 free) {
  constexpr int STEP = BLOCKS == 1 ? 4 : BLOCKS == 2 ? 2 : 1;  // times 16 columns, of a group of products
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < AT_A_TIME; k++) {
    uint4 word[BLOCKS];
    uint2 scale[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const u8* const block = weights + (k * TILE + b) * BLOCK_BYTES;
      word[b] = *(const uint4*)(block + lane * 16), scale[b] = *(const uint2*)(block + CODE_BYTES + lane / 4 * 8);
    }
#pragma unroll
    for (int step = 0; step < 4 / STEP; step++) {
      u32 a[STEP][BLOCKS][4];
      settled<1>();
      if (k * 4 / STEP + step == 1 && lane == 0 && free) arrive(free);
#pragma unroll
      for (int i = 0; i < STEP; i++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          const int at = step * STEP + i;
          unpack((&word[b].x)[at], scale_pair(scale[b].x, at), scale_pair(scale[b].y, at), a[i][b]);
        }
      begins();
#pragma unroll
      for (int i = 0; i < STEP; i++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
          wgmma(sum[b], a[i][b], x + (k * ROWS * DEPTH + (step * STEP + i) * 16) / 8);
      committed();
    }
  }
}

// What `finish` adds to a warp's 16 rows of W, of which n is the first: B as an mma takes it, its first ranks, and the
// bias.
struct Rest {
  static constexpr int RANKS = 32;
  u32 b[RANKS / 16][4];
  float bias[2];
};

// 16 ranks of B from r, zero beyond the last.
__device__ void load_b(u32 (&b)[4], const u16* B, const Shape& s, int n, int r) {
  const int lane = threadIdx.x % 32, left = s.rank - r - lane % 4 * 2;
  const u16* const low = B + (long long)(n + lane / 4) * s.rank + r + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; i++) b[i] = left > i / 2 * 8 ? *(const u32*)(low + i % 2 * 8 * s.rank + i / 2 * 8) : 0;
}

__device__ void load_rest(Rest& rest, const u16* B, const u16* bias, const Shape& s, int n) {
#pragma unroll
  for (int i = 0; i < Rest::RANKS / 16; i++) load_b(rest.b[i], B, s, n, i * 16);
#pragma unroll
  for (int i = 0; i < 2; i++) rest.bias[i] = bias ? widened(bias[n + threadIdx.x % 32 / 4 + i * 8]) : 0.f;
}

// Finish the sums of a warp's 16 rows of W, from n, and of COUNT times 8 rows of x, from m: scale them, add bias and
// adapter, store them. `out` is the warp's.
template <int COUNT>
__device__ void finish(float (&sum)[COUNT * 4], const Rest& rest, float factor, const u16* t, const u16* B, u16* y, u8* out,
                       const Shape& s, int n, int m) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < COUNT * 4; i++) sum[i] = sum[i] * factor + rest.bias[i / 2 % 2];
  const u16* const own = t + (m + g) * s.stride_of_t + part_of(s, n) * s.rank + 2 * q;
  auto add = [&](const u32(&b)[4], int r) {
    const int left = s.rank - r - 2 * q;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u32* const two = (const u32*)(own + i * 8 * s.stride_of_t + r);
      mma(*(float(*)[4])(sum + i * 4), b[0], b[1], b[2], b[3], left > 0 ? two[0] : 0, left > 8 ? two[4] : 0);
    }
  };
#pragma unroll
  for (int i = 0; i < Rest::RANKS / 16; i++)
    if (i * 16 < s.rank) add(rest.b[i], i * 16);
  for (int r = Rest::RANKS; r < s.rank; r += 16) {
    u32 b[4];
    load_b(b, B, s, n, r);
    add(b, r);
  }
  constexpr int AT_ONCE = COUNT < 2 ? 1 : 2;  // times 8 rows, and 16 lanes that store
#pragma unroll
  for (int i = 0; i < COUNT; i += AT_ONCE) {
#pragma unroll
    for (int j = 0; j < AT_ONCE * 4; j++)
      *(u16*)(out + (j / 4 * 8 + 2 * q + j % 2) * PITCH + (g + j / 2 % 2 * 8) * 2) = rounded(sum[i * 4 + j]);
    __syncwarp();
    const int row = m + i * 8 + lane / 2;
    if (lane < AT_ONCE * 16 && row < s.M)
      *(uint4*)(y + (long long)row * s.N + n + lane % 2 * 8) = *(const uint4*)(out + lane / 2 * PITCH + lane % 2 * 16);
    __syncwarp();
  }
}

// Leave the sums of a piece, and when all have, finish a part of the tile.
template <int ROWS, int TILE, int GROUPS, int BLOCKS>
__device__ void share(const float (&sum)[BLOCKS][ROWS / 2], float factor, const Memory<ROWS, TILE, GROUPS>& m, const u16* B,
                      const u16* bias, u16* y, u8* out, float4* partial, u64* meeting, const Shape& s, int n) {
  constexpr int FOURS = ROWS / 8, OF_TILE = TILE * FOURS * 128;
  const int tile = blockIdx.x / s.pieces, block = n / BLOCK - tile * TILE;
  float4* const of_tile = partial + ((long long)tile * s.pieces * TILE + block) * FOURS * 128 + threadIdx.x % 128;
  float4* const own = of_tile + blockIdx.x % s.pieces * OF_TILE;
#pragma unroll
  for (int i = 0; i < BLOCKS * FOURS; i++) {
    const float* const four = &sum[0][0] + i * 4;
    own[i * 128] = make_float4(four[0], four[1], four[2], four[3]);
  }
  __threadfence();
  sync(SUMS, m.MULTIPLIERS);
  if (threadIdx.x == 0) await(meeting + tile, joined(meeting + tile, s.pieces));
  sync(SUMS, m.MULTIPLIERS);
  wait(m.ready, 0);
  const int piece = blockIdx.x % s.pieces, all = BLOCKS * FOURS;
  for (int i = all * piece / s.pieces; i < all * (piece + 1) / s.pieces; i++) {
    const int row = n + i / FOURS * BLOCK;
    if (row >= s.N) break;
    Rest rest;
    load_rest(rest, B, bias, s, row);
    float four[4] = {};
    for (int from = 0; from < s.pieces; from += LOADS) {
      float4 one[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; j++)
        one[j] = from + j < s.pieces ? __ldcg(of_tile + (from + j) * OF_TILE + i * 128) : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int j = 0; j < LOADS; j++) four[0] += one[j].x, four[1] += one[j].y, four[2] += one[j].z, four[3] += one[j].w;
    }
    finish<1>(four, rest, factor, m.t, B, y, out, s, row, i % FOURS * 8);
  }
}

// A warpgroup: its blocks of every tile.
template <int ROWS, int TILE, int GROUPS, bool SHARED, int BLOCKS>
__device__ void multiply_all(const Memory<ROWS, TILE, GROUPS>& m, const float* divisor, const u16* B, const u16* bias,
                             u16* y, float4* partial, u64* meeting, const Shape& s, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  const int first_block = group * m.FEW + min(group, m.MORE);
  const u8* const weights = m.weights + first_block * BLOCK_BYTES + warp % 4 * WARP_BYTES;
  u8* const out = m.out + warp * OUT_BYTES;
  const float factor = 128 / *divisor;
  const Span span(s);
  int stage = 0, parity = 0;
  for (int tile = blockIdx.x / s.pieces; tile < tiles; tile += gridDim.x) {
    const int n = (tile * TILE + first_block) * BLOCK + warp % 4 * 16;
    float sum[BLOCKS][ROWS / 2];
#pragma unroll
    for (int i = 0; i < BLOCKS * ROWS / 2; i++) (&sum[0][0])[i] = 0;
    u32 free = 0;
    for (int k = span.first; k < span.end; k++) {
      wait(m.full + 8 * stage, parity);
      const int at = stage * AT_A_TIME;
      multiply<ROWS, TILE, BLOCKS>(sum, weights + at * m.W_BYTES, matrix(m.x + at * m.X_BYTES), free);
      free = m.empty + 8 * stage;
      if (++stage == s.stages) stage = 0, parity ^= 1;
    }
    Rest rest[BLOCKS];
    if (!SHARED)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        if (n + b * BLOCK < s.N) load_rest(rest[b], B, bias, s, n + b * BLOCK);
    settled<0>();
    complete(*(float(*)[BLOCKS * ROWS / 2])sum);
    if (lane == 0) arrive(free);
    if (SHARED) {
      share(sum, factor, m, B, bias, y, out, partial, meeting, s, n);
      continue;
    }
    wait(m.ready, 0);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
      if (n + b * BLOCK < s.N) finish<ROWS / 8>(sum[b], rest[b], factor, m.t, B, y, out, s, n + b * BLOCK, 0);
  }
}

template <int ROWS, int TILE, int GROUPS, bool SHARED>
__device__ void fp4_tiles(const TensorMap* x, const u8* packed, const float* divisor, const float* sums, const u16* B,
                          const u16* bias, u16* y, u16* t, float4* partial, u64* meeting, const Shape& s) {
  typedef Memory<ROWS, TILE, GROUPS> M;
  DYNAMIC_SHARED(memory);
  const M m(s, memory);
  const int group = threadIdx.x / 128, tiles = (s.N / BLOCK + TILE - 1) / TILE;
  if (threadIdx.x < s.stages) {
    begin(m.full + 8 * threadIdx.x, 1), begin(m.empty + 8 * threadIdx.x, M::MULTIPLIERS / 32);
    if (threadIdx.x == 0) begin(m.ready, ADDERS);
    begun();
  }
  __syncthreads();
  next_may_start();
  if (group < M::MORE) {
    registers<M::REGISTERS, true>();
    multiply_all<ROWS, TILE, GROUPS, SHARED, M::FEW + 1>(m, divisor, B, bias, y, partial, meeting + 1, s, tiles);
  } else if (group < GROUPS) {
    registers<M::REGISTERS, true>();
    multiply_all<ROWS, TILE, GROUPS, SHARED, M::FEW>(m, divisor, B, bias, y, partial, meeting + 1, s, tiles);
  } else {
    registers<REGISTERS_OF_OTHERS, false>();
    if (threadIdx.x >= M::THREADS - ADDERS) add_up(sums, t, meeting, s, m.t, m.ready);
    else if (elected()) carry(x, packed, s, m, tiles);
  }
}

#define FP4_TILES(ROWS, TILE, GROUPS, SHARED) \
  extern "C" __global__ void __launch_bounds__((Memory<ROWS, TILE, GROUPS>::THREADS), 1) \
  fp4_tiles_##ROWS##_##TILE##_##GROUPS##_##SHARED( \
      const __grid_constant__ TensorMap x, const u8* packed, const float* divisor, const float* sums, const u16* B, \
      const u16* bias, u16* y, u16* t, float4* partial, u64* meeting, const Shape s) { \
    fp4_tiles<ROWS, TILE, GROUPS, SHARED>(&x, packed, divisor, sums, B, bias, y, t, partial, meeting, s); \
  }
