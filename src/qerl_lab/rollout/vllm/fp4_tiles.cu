// y[M, N] = x W^T + bias + (x A^T) B^T for up to ROWS rows; each part of y (q, k, v) has its own A and B. W is NVFP4 in the
// layout of formats/tiles.py. fp4_tiles.py compiles this file for ROWS, TILE, GROUPS and SHARED and explains the design.
//
// A multiprocessor runs one block. A block computes whole tiles of W (TILE times 64 rows); with fewer tiles than blocks
// (SHARED) it computes a piece of one tile's columns. One warp, the carrier, starts bulk copies of codes, scales and x into
// a ring in shared memory. GROUPS warpgroups multiply: each unpacks its rows of W into registers, as bfloat16, for a
// product with x from shared memory. While the tensor cores work for one warpgroup, others unpack. Three warps compute
// t = x A^T meanwhile, each block a part for all blocks; the warpgroups add t B^T at the end. With SHARED all blocks write
// their sums, and each finishes a part of the tile, in a fixed order, so that the same inputs give the same bits.

#include "fp4.cuh"
#ifdef __CUDACC__
#include "wgmma.cuh"
#endif

constexpr int MAKERS = 96, OTHERS = 32 + MAKERS, REGISTERS_OF_OTHERS = 56;  // MAKERS compute t
constexpr int BLOCK = 64;                 // rows of W that a warpgroup multiplies at once
constexpr int DEPTH = 64, AT_A_TIME = 2;  // columns of a block (128 bytes of x, the swizzle's width); blocks per stage
constexpr int BLOCK_BYTES = 2304, WARP_BYTES = BLOCK_BYTES / 4, CODE_BYTES = 512;
constexpr int PITCH = 48, OUT_BYTES = 16 * PITCH;  // staging of y before the store: per row, per warp
constexpr int LOADS = 8;                           // loads in flight per thread
constexpr int RANKS = 32, MAX_RANK = 128, B_BYTES = BLOCK * RANKS * 2;  // ranks per step; at most; B per step
enum Barrier { ALL, SUMS, MADE };                  // ALL is used by __syncthreads

struct Shape {
  int M, N, K, stride;   // stride: between rows of x
  int R, rank;           // rows of A, in all and per part
  int width, columns;    // columns of t, per part (padded with 0 to a multiple of RANKS) and in all
  int part_1, part_2;    // first column of y of the second and third part, N if absent
  int splits, of_split;  // splits of x A^T; columns of x per split
  int depth, pieces;     // stages per tile; blocks that share a tile
  int few, more;         // stages per piece; number of pieces with one more
  int stages;            // stages of the ring
};

__device__ int slabs(const Shape& s) { return (s.columns + DEPTH - 1) / DEPTH; }  // slabs of DEPTH columns of t

// Go to the next stage of the ring; each round flips the parity of its barriers.
__device__ void advance(const Shape& s, int& stage, int& parity) {
  if (++stage == s.stages) stage = 0, parity ^= 1;
}

// Layout of shared memory and split of threads and registers. x and t have slabs of DEPTH columns.
template <int ROWS, int TILE, int GROUPS>
struct Memory {
  static constexpr int MULTIPLIERS = GROUPS * 128, THREADS = MULTIPLIERS + OTHERS;
  static constexpr int BEGUN = 65536 / THREADS / 8 * 8 * THREADS;  // registers per block, before they are redistributed
  static constexpr int REGISTERS = (BEGUN - OTHERS * REGISTERS_OF_OTHERS) / MULTIPLIERS / 8 * 8;  // per multiplying thread
  static constexpr int FEW = TILE / GROUPS, MORE = TILE % GROUPS;  // blocks per group; number of groups with one more
  static constexpr int W_BYTES = TILE * BLOCK_BYTES, X_BYTES = ROWS * DEPTH * 2;  // per block of columns
  u8 *weights, *out;
  u32 x, t, full, empty, ready;

  __device__ Memory(const Shape& s, u8* memory) {
    const int x_bytes = s.stages * AT_A_TIME * X_BYTES;
    weights = memory + x_bytes + slabs(s) * X_BYTES;
    u64* const barriers = (u64*)(weights + s.stages * AT_A_TIME * W_BYTES);
    out = (u8*)(barriers + 2 * s.stages + 2);
    x = shared(memory), t = x + x_bytes, full = shared(barriers), empty = full + 8 * s.stages, ready = empty + 8 * s.stages;
  }
};

// Work of a block: the tiles from `tile` in steps of gridDim.x, and of each the stages from `first` to `end`.
template <bool SHARED>
struct Work {
  int tile, piece, first, end;

  __device__ Work(const Shape& s) {
    tile = SHARED ? blockIdx.x / s.pieces : blockIdx.x, piece = SHARED ? blockIdx.x - tile * s.pieces : 0;
    first = piece * s.few + min(piece, s.more), end = first + s.few + (piece < s.more);
  }
};

// Unpack four pairs of weights and multiply by their scales: a[0] and a[2] by `low` of one row, a[1] and a[3] by `high` of
// the other. Sign and magnitude bits are moved to their bfloat16 positions, which gives 2^-126 times the value.
__device__ void unpack(u32 word, u32 low, u32 high, u32 (&a)[4]) {
  const u32 places = 0x81C081C0u;
  a[0] = times_bf16(word & places, low), a[1] = times_bf16(word << 3 & places, high);
  a[2] = times_bf16(word << 6 & places, low);
  a[3] = times_bf16((word << 1 & 0x80008000u) | (word >> 4 & 0x00C000C0u) | (word >> 5 & 0x01000100u), high);
}

// Scale i of a word times 2^119, in both halves; in the layout of `pack` exponents count from 2^-9.
__device__ u32 scale_pair(u32 scales, int i) { return __byte_perm(scales, 0, 0x4040 + i * 0x0101) * 16 + 0x76807680u; }

// Carrier warp: keep the ring full. It loads W of the first stages at once, because W does not depend on the previous
// launch. Without SHARED the tile's rows of B follow, RANKS columns per stage.
template <int ROWS, int TILE, int GROUPS, bool SHARED>
__device__ void carry(const TensorMap* x, const TensorMap* rows_of_B, const u8* packed, const u16* B, const Shape& s,
                      const Memory<ROWS, TILE, GROUPS>& m, int tiles) {
  typedef Memory<ROWS, TILE, GROUPS> M;
  constexpr int X_STAGE = AT_A_TIME * M::X_BYTES, W_STAGE = AT_A_TIME * M::W_BYTES;
  const u32 weights = shared(m.weights);
  const Work<SHARED> w(s);
  const int ahead = min(s.stages, w.end - w.first);
  auto bring_weights = [&](int tile, int k, int stage) {
    arrive_expecting(m.full + 8 * stage, X_STAGE + W_STAGE);
    copy(weights + stage * W_STAGE, packed + ((long long)tile * s.depth + k) * W_STAGE, W_STAGE, m.full + 8 * stage);
  };
  prefetch(x);
  if (!SHARED) prefetch(rows_of_B);
#pragma unroll 1
  for (int i = 0; i < ahead; i++) bring_weights(w.tile, w.first + i, i);
  awaited();
  int stage = 0, parity = 1;
#pragma unroll 1
  for (int tile = w.tile; tile < tiles; tile += gridDim.x) {
    const int n = tile * TILE * BLOCK;
    if (w.piece == 0) prefetch(B + (long long)n * s.rank, min(TILE * BLOCK, s.N - n) * s.rank * 2);
#pragma unroll 1
    for (int k = w.first; k < w.end; k++) {
      if (tile > w.tile || k >= w.first + ahead) wait(m.empty + 8 * stage, parity), bring_weights(tile, k, stage);
      copy_tile(m.x + stage * X_STAGE, x, k * AT_A_TIME, m.full + 8 * stage);
      advance(s, stage, parity);
    }
#pragma unroll 1
    for (int r = 0; r < (SHARED ? 0 : s.rank); r += RANKS) {
      wait(m.empty + 8 * stage, parity);
      arrive_expecting(m.full + 8 * stage, TILE * B_BYTES);
#pragma unroll 1
      for (int b = 0; b < TILE; b++)
        copy_rows(weights + stage * W_STAGE + b * B_BYTES, rows_of_B, r, n + b * BLOCK, m.full + 8 * stage);
      advance(s, stage, parity);
    }
  }
}

// Return the part that contains column `column` of t.
__device__ int part_of_t(const Shape& s, int column) { return (column >= s.width) + (column >= 2 * s.width); }

// One warp: compute 16 columns and 16 rows of t for one split. The order of columns within a product does not matter, so
// each lane loads 16 contiguous bytes of a row.
__device__ void shrink(const u16* x, const u16* A, float* sums, const Shape& s, int item) {
  const int lane = threadIdx.x % 32, rows = (s.M + 15) / 16, columns = s.columns / 16, rest = item / rows;
  const int split = rest / columns, column = (rest - split * columns) * 16, row = (item - rest * rows) * 16 + lane / 4;
  const int part = part_of_t(s, column), rank = column - part * s.width + lane / 4, first = split * s.of_split;
  u32 of_A[2], of_x[2];  // offsets of rows, clamped to the last
#pragma unroll
  for (int i = 0; i < 2; i++) {
    of_A[i] = (part * s.rank + min(rank + i * 8, s.rank - 1)) * s.K + first + lane % 4 * 8;
    of_x[i] = min(row + i * 8, s.M - 1) * s.stride + first + lane % 4 * 8;
  }
  float sum[2][4] = {};
#pragma unroll 1
  for (int k = 0; k < min(s.of_split, s.K - first); k += 64) {
    uint4 v[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i / 2][i % 2] = *(const uint4*)(A + (of_A[i % 2] + k + i / 2 * 32));
      v[i / 2][2 + i % 2] = *(const uint4*)(x + (of_x[i % 2] + k + i / 2 * 32));
    }
    __syncwarp();  // issue all loads before waiting for one
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4(&of)[4] = v[i / 2];
      mma(sum[i % 2], of[0].x, of[1].x, of[0].y, of[1].y, of[2 + i % 2].x, of[2 + i % 2].y);
      mma(sum[i % 2], of[0].z, of[1].z, of[0].w, of[1].w, of[2 + i % 2].z, of[2 + i % 2].w);
    }
  }
  float* const to = sums + ((long long)split * s.columns + column + lane / 4) * rows * 16 + row - lane / 4 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* const two = sum[i / 2] + i % 2 * 2;
    *(float2*)(to + i % 2 * 8 * rows * 16 + i / 2 * 8) = make_float2(two[0], two[1]);
  }
}

// Return the column of t for a rank: in a product of RANKS each lane has eight ranks, in four pairs.
__device__ int place_of(int rank) {
  return rank / RANKS * RANKS + rank % 8 / 4 * 16 + rank % 4 / 2 * 8 + rank % RANKS / 8 * 2 + rank % 2;
}

// Add up the splits of this block's share of t, and store it in the layout of x.
template <int ROWS>
__device__ void add_up(const float* sums, u16* t, const Shape& s, int thread) {
  const int rows = (s.M + 15) / 16 * 16, all = s.columns * rows;
#pragma unroll 1
  for (int i = blockIdx.x * MAKERS + thread; i < all; i += gridDim.x * MAKERS) {
    const int column = i / rows, row = i - column * rows, place = place_of(column);
    const int splits = column - part_of_t(s, column) * s.width < s.rank ? s.splits : 0;
    float sum = 0;
#pragma unroll 1
    for (int split = 0; split < splits; split += 2 * LOADS) {
      float one[2 * LOADS];
#pragma unroll
      for (int j = 0; j < 2 * LOADS; j++) one[j] = split + j < splits ? __ldcg(sums + (split + j) * all + i) : 0;
#pragma unroll
      for (int j = 0; j < 2 * LOADS; j++) sum += one[j];
    }
    t[(place / DEPTH * ROWS + row) * DEPTH + (place % DEPTH / 8 ^ row % 8) * 8 + place % 8] = rounded(sum);
  }
}

// Compute t = x A^T in bfloat16, in the layout of x. Each block computes a share; after all have, each copies the whole.
template <int ROWS>
__device__ void make_t(const u16* x, const u16* A, float* sums, u16* t, u64* counters, const Shape& s, u32 own, u32 ready) {
  const int thread = threadIdx.x - (blockDim.x - MAKERS), warps = MAKERS / 32;
  const int items = (s.M + 15) / 16 * (s.columns / 16) * s.splits;
  const int eights = s.R * s.K / 8, few = (eights + gridDim.x - 1) / gridDim.x, first = blockIdx.x * few;  // share of A
  if (thread == 0 && first < eights) prefetch(A + first * 8, min(few, eights - first) * 16);
  awaited();
#pragma unroll 1
  for (int item = blockIdx.x * warps + thread / 32; item < items; item += gridDim.x * warps) shrink(x, A, sums, s, item);
  sync(MADE, MAKERS);
  if (thread == 0) await(counters, arrived(counters, gridDim.x, blockIdx.x == 0));
  sync(MADE, MAKERS);
  add_up<ROWS>(sums, t, s, thread);
  seen_by_copies();
  sync(MADE, MAKERS);
  if (thread) return;
  await(counters + 1, arrived(counters + 1, gridDim.x, blockIdx.x == 0));
  seen_by_copies();
  const u32 bytes = slabs(s) * ROWS * DEPTH * 2;
  arrive_expecting(ready, bytes);
  copy(own, t, bytes, ready);
  wait(ready, 0);  // a block must not end before the copy into its memory has, even if it does not use it
}

// Unpacked weights of two steps for BLOCKS blocks: the tensor cores read one step while the other is written.
template <int BLOCKS>
struct Operands {
  static constexpr int STEP = BLOCKS > 2 ? 1 : 2, STEPS = 4 / STEP;  // 16-column groups per step; steps per block
  u32 of[2][STEP][BLOCKS][4];
};

// Multiply the warpgroup's rows of W by all rows of x, for the columns of one stage. `weights` points at the warp's part,
// `x` is a `matrix` descriptor. `free` is the previous stage's barrier; its x has been read when the second step begins.
template <int ROWS, int TILE, int BLOCKS>
__device__ void multiply(float (&sum)[BLOCKS][ROWS / 2], Operands<BLOCKS>& a, const u8* weights, u32 x, u32 free) {
  constexpr int STEP = Operands<BLOCKS>::STEP, STEPS = Operands<BLOCKS>::STEPS;
  const int lane = threadIdx.x % 32;
#pragma unroll (BLOCKS == 1 ? AT_A_TIME : 1)  // more blocks would need too many registers
  for (int k = 0; k < AT_A_TIME; k++) {
    if (k == 0 || BLOCKS > 1) x = __shfl_sync(~0u, x, 0);  // tells the compiler that all lanes hold the same value
    uint4 word[BLOCKS];
    uint2 scale[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const u8* const block = weights + b * BLOCK_BYTES;
      word[b] = *(const uint4*)(block + lane * 16), scale[b] = *(const uint2*)(block + CODE_BYTES + lane / 4 * 8);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      auto& own = a.of[step % 2];
      settled<1>();
      if (k == 0 && step == 1 && lane == 0 && free) arrive(free);
#pragma unroll
      for (int i = 0; i < STEP; i++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          const int at = step * STEP + i;
          unpack((&word[b].x)[at], scale_pair(scale[b].x, at), scale_pair(scale[b].y, at), own[i][b]);
        }
      begins();
#pragma unroll
      for (int i = 0; i < STEP; i++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
          wgmma(sum[b], own[i][b], x + (step * STEP + i) * 2);
      committed();
    }
    weights += TILE * BLOCK_BYTES, x += ROWS * DEPTH / 8;
  }
}

// Return row n of W `blocks` blocks further, clamped to the last block; results beyond it are not stored.
__device__ int further(const Shape& s, int n, int blocks) { return min(n + blocks * BLOCK, s.N - BLOCK + n % BLOCK); }

// Bias of the warp's rows from n in each block; a lane holds two rows per block.
template <int BLOCKS>
struct Bias {
  float of[BLOCKS][2];

  __device__ Bias(const u16* bias, const Shape& s, int n) {
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; i++)
      of[i / 2][i % 2] = bias ? widened(bias[further(s, n, i / 2) + threadIdx.x % 32 / 4 + i % 2 * 8]) : 0;
  }

  template <int COUNT>
  __device__ void add_to(float (&sum)[BLOCKS][COUNT], float factor) const {  // sum = sum * factor + bias
#pragma unroll
    for (int i = 0; i < BLOCKS * COUNT; i++)
      (&sum[0][0])[i] = (&sum[0][0])[i] * factor + of[i / COUNT][i / 2 % 2];
  }
};

// sum += B t for the warp's rows from n, RANKS columns of B from r (`b` holds the lane's eight columns of two rows), and
// COUNT rows of t from `t` on.
template <int ROWS, int COUNT>
__device__ void add(float (&sum)[COUNT / 2], const uint4 (&b)[2], const Shape& s, u32 t, int n, int r) {
  constexpr int ROW_BYTES = DEPTH * 2;
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;  // row of t that this lane points at
  const int column = part_of(s, n) * s.width + r, at = column % DEPTH / 8 + lane / 8 % 2;
  const u32 slab = t + (column / DEPTH * ROWS + row) * ROW_BYTES;
#pragma unroll
  for (int m = 0; m < COUNT; m += 16) {
    u32 first[4], second[4];
    load_matrices(first, slab + (at ^ row % 8) * 16 + m * ROW_BYTES);
    load_matrices(second, slab + (at + 2 ^ row % 8) * 16 + m * ROW_BYTES);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float(&to)[4] = *(float(*)[4])(sum + m / 2 + j * 4);
      mma(to, b[0].x, b[1].x, b[0].y, b[1].y, first[j * 2], first[j * 2 + 1]);
      mma(to, b[0].z, b[1].z, b[0].w, b[1].w, second[j * 2], second[j * 2 + 1]);
    }
  }
}

// Store the sums of a warp's 16 rows of W from n and COUNT rows of x from m to y. `out` is the warp's staging memory.
template <int COUNT>
__device__ void store(const float (&sum)[COUNT / 2], u16* y, u8* out, const Shape& s, int n, int m) {
  const int lane = threadIdx.x % 32;
  const u32 place = shared(out) + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
#pragma unroll
  for (int i = 0; i < COUNT; i += 16) {
    u32 four[4];
#pragma unroll
    for (int j = 0; j < 4; j++) four[j] = rounded_two(sum[i / 2 + j * 2], sum[i / 2 + j * 2 + 1]);
    store_transposed(place, four);
    __syncwarp();
    const int row = m + i + lane / 2;
    if (row < s.M)
      *(uint4*)(y + (long long)row * s.N + n + lane % 2 * 8) = *(const uint4*)(out + lane / 2 * PITCH + lane % 2 * 16);
    __syncwarp();
  }
}

// Write this piece's sums; after all pieces have, finish a part of the tile, 16 rows of x at a time.
template <int ROWS, int TILE, int GROUPS, int BLOCKS>
__device__ void share(const float (&sum)[BLOCKS][ROWS / 2], float factor, const Memory<ROWS, TILE, GROUPS>& m, const u16* B,
                      const u16* bias, u16* y, u8* out, float4* partial, u64* counters, const Shape& s, const Work<true>& w,
                      int n) {
  constexpr int FOURS = ROWS / 8, OF_TILE = TILE * FOURS * 128, PARTS = ROWS / 16;
  const int block = n / BLOCK - w.tile * TILE;
  float4* const of_tile = partial + ((long long)w.tile * s.pieces * TILE + block) * FOURS * 128 + threadIdx.x % 128;
  float4* const own = of_tile + w.piece * OF_TILE;
#pragma unroll
  for (int i = 0; i < BLOCKS * FOURS; i++) {
    const float* const four = &sum[0][0] + i * 4;
    own[i * 128] = make_float4(four[0], four[1], four[2], four[3]);
  }
  sync(SUMS, m.MULTIPLIERS);
  uint4 b[MAX_RANK / RANKS][2];
  auto load = [&](int i) {  // load all ranks of part i before its sums
    const int row = n + i / PARTS * BLOCK + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < MAX_RANK / RANKS * 2; j++) {
      const int rank = j / 2 * RANKS + threadIdx.x % 4 * 8;
      const bool there = i < BLOCKS * PARTS && row < s.N && rank < s.rank;
      b[j / 2][j % 2] = there ? *(const uint4*)(B + (long long)(row + j % 2 * 8) * s.rank + rank) : make_uint4(0, 0, 0, 0);
    }
  };
  load(w.piece);
  if (threadIdx.x == 0) await(counters + w.tile, arrived(counters + w.tile, s.pieces, w.piece == 0));
  sync(SUMS, m.MULTIPLIERS);
#pragma unroll 1
  for (int i = w.piece; i < BLOCKS * PARTS; i += s.pieces, load(i)) {
    const int row = n + i / PARTS * BLOCK, of_x = i % PARTS * 16;
    if (row >= s.N) break;
    if (of_x >= s.M) continue;
    const Bias<1> added(bias, s, row);
    float whole[1][8] = {};
#pragma unroll 1
    for (int from = 0; from < s.pieces; from += LOADS) {
      const float4* at = of_tile + from * OF_TILE + i * 256;
      int left = s.pieces - from;
      as_given(at, left);  // keep one address; the compiler would otherwise compute sixteen and serialize the loads
      float4 one[LOADS][2];
#pragma unroll
      for (int j = 0; j < LOADS * 2; j++)
        one[j / 2][j % 2] = j / 2 < left ? __ldcg(at + (j / 2 * OF_TILE + j % 2 * 128)) : make_float4(0, 0, 0, 0);
      __syncwarp();  // issue all loads before waiting for one
#pragma unroll
      for (int j = 0; j < LOADS * 2; j++) {
        float* const four = whole[0] + j % 2 * 4;
        const float4& its = one[j / 2][j % 2];
        four[0] += its.x, four[1] += its.y, four[2] += its.z, four[3] += its.w;
      }
    }
    added.add_to(whole, factor);
    wait(m.ready, 0);
#pragma unroll
    for (int r = 0; r < MAX_RANK; r += RANKS)
      if (r < s.rank) add<ROWS, 16>(whole[0], b[r / RANKS], s, m.t + of_x * DEPTH * 2, row, r);
    store<16>(whole[0], y, out, s, row, of_x);
  }
}

// sum += B t for the warp's rows from n in each block, when a tile is not shared: B follows W in the ring. `first` is the
// warpgroup's first block in the tile.
template <int ROWS, int TILE, int GROUPS, int BLOCKS>
__device__ void add_all(float (&sum)[BLOCKS][ROWS / 2], const Memory<ROWS, TILE, GROUPS>& m, const Shape& s, int n, int first,
                        int& stage, int& parity) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll 1
  for (int r = 0; r < s.rank; r += RANKS) {
    const u8* const rows = m.weights + stage * AT_A_TIME * m.W_BYTES + first * B_BYTES + warp * B_BYTES / 4;
    wait(m.full + 8 * stage, parity);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      const uint4* const own = (const uint4*)(rows + block * B_BYTES) + lane;  // four uint4 per row
      const uint4 b[2] = {own[0], own[8 * 4]};
      add<ROWS, ROWS>(sum[block], b, s, m.t, further(s, n, block), r);
    }
    __syncwarp();
    if (lane == 0) arrive(m.empty + 8 * stage);
    advance(s, stage, parity);
  }
}

// Wait for the products, so that their sums can be read, and release the last stage.
template <int BLOCKS, int SUMS_OF_BLOCK>
__device__ void end(float (&sum)[BLOCKS][SUMS_OF_BLOCK], u32 last) {
  settled<0>();
  complete(*(float(*)[BLOCKS * SUMS_OF_BLOCK])sum);
  if (threadIdx.x % 32 == 0) arrive(last);
}

// One warpgroup: compute its blocks of every tile.
template <int ROWS, int TILE, int GROUPS, bool SHARED, int BLOCKS>
__device__ void multiply_all(const Memory<ROWS, TILE, GROUPS>& m, const float* global_scale, const u16* B, const u16* bias,
                             u16* y, float4* partial, u64* counters, const Shape& s, int tiles) {
  const int warp = threadIdx.x / 32, group = warp / 4;
  const int first_block = group * m.FEW + min(group, m.MORE);
  const u8* const weights = m.weights + first_block * BLOCK_BYTES + warp % 4 * WARP_BYTES;
  u8* const out = m.out + warp * OUT_BYTES;
  const float factor = __fdividef(128, *global_scale);
  const Work<SHARED> w(s);
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int tile = w.tile; tile < tiles; tile += gridDim.x) {
    const int n = (tile * TILE + first_block) * BLOCK + warp % 4 * 16;
    float sum[BLOCKS][ROWS / 2];
#pragma unroll
    for (int i = 0; i < BLOCKS * ROWS / 2; i++) (&sum[0][0])[i] = 0;
    Operands<BLOCKS> a;
    u32 free = 0;
#pragma unroll 1
    for (int k = w.first; k < w.end; k++) {
      wait(m.full + 8 * stage, parity);
      const int at = stage * AT_A_TIME;
      multiply<ROWS, TILE, BLOCKS>(sum, a, weights + at * m.W_BYTES, matrix(m.x + at * m.X_BYTES), free);
      free = m.empty + 8 * stage;
      advance(s, stage, parity);
    }
    if constexpr (SHARED) {
      end(sum, free);
      share(sum, factor, m, B, bias, y, out, partial, counters, s, w, n);
    } else {
      const Bias<BLOCKS> added(bias, s, n);
      end(sum, free);
      added.add_to(sum, factor);
      wait(m.ready, 0);
      add_all(sum, m, s, n, first_block, stage, parity);
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
        if (n + block * BLOCK < s.N) store<ROWS>(sum[block], y, out, s, n + block * BLOCK, 0);
    }
  }
}

template <int ROWS, int TILE, int GROUPS, bool SHARED>
__device__ void fp4_tiles(const TensorMap* tiles_of_x, const TensorMap* rows_of_B, const u16* x, const u8* packed,
                          const float* global_scale, const u16* A, const u16* B, const u16* bias, u16* y, float* sums,
                          u16* t, float4* partial, u64* counters, const Shape& s) {
  typedef Memory<ROWS, TILE, GROUPS> M;
  DYNAMIC_SHARED(memory);
  const M m(s, memory);
  const int group = threadIdx.x / 128, tiles = (s.N / BLOCK + TILE - 1) / TILE;
  if (threadIdx.x < s.stages) {
    begin(m.full + 8 * threadIdx.x, 1), begin(m.empty + 8 * threadIdx.x, M::MULTIPLIERS / 32);
    if (threadIdx.x == 0) begin(m.ready, 1);
    begun();
  }
  __syncthreads();
  next_may_start();
  if (group < M::MORE) {
    registers<M::REGISTERS, true>();
    multiply_all<ROWS, TILE, GROUPS, SHARED, M::FEW + 1>(m, global_scale, B, bias, y, partial, counters + 2, s, tiles);
  } else if (group < GROUPS) {
    registers<M::REGISTERS, true>();
    multiply_all<ROWS, TILE, GROUPS, SHARED, M::FEW>(m, global_scale, B, bias, y, partial, counters + 2, s, tiles);
  } else {
    registers<REGISTERS_OF_OTHERS, false>();
    if (threadIdx.x >= M::THREADS - MAKERS) make_t<ROWS>(x, A, sums, t, counters, s, m.t, m.ready);
    else if (elected()) carry<ROWS, TILE, GROUPS, SHARED>(tiles_of_x, rows_of_B, packed, B, s, m, tiles);
  }
}

#define FP4_TILES(ROWS, TILE, GROUPS, SHARED) \
  extern "C" __global__ void __launch_bounds__((Memory<ROWS, TILE, GROUPS>::THREADS), 1) \
  fp4_tiles_##ROWS##_##TILE##_##GROUPS##_##SHARED( \
      const __grid_constant__ TensorMap tiles_of_x, const __grid_constant__ TensorMap rows_of_B, const u16* x, \
      const u8* packed, const float* global_scale, const u16* A, const u16* B, const u16* bias, u16* y, float* sums, \
      u16* t, float4* partial, u64* counters, const Shape s) { \
    fp4_tiles<ROWS, TILE, GROUPS, SHARED>(&tiles_of_x, &rows_of_B, x, packed, global_scale, A, B, bias, y, sums, t, \
                                          partial, counters, s); \
  }
