// y[M, N] = x W^T + bias + (x A^T) B^T for few rows, in one launch. W is NVFP4 in the trainer's own row-major layout.
// fp4_linear.py compiles it and has the why of it.
//
// A multiprocessor holds one block. The first of its warps multiply: each owns SLICE columns of x, in registers from first
// to last, and of every 16 rows of W it takes those columns. A warp, the carrier, has the copy engine bring the rows into
// a ring in shared memory. The last warps, the closers, compute their share of x A^T meanwhile; then they add up what the
// warps have of a tile, where K is cut into pieces what the blocks have, bias and adapter, round once, and store y.
//
// A lane (g, t) = (lane / 4, lane % 4) of a warp reads 16 bytes, 32 weights, of the rows g and g + 8. Which weights meet in
// one mma is free as long as x has the same order, so words are unpacked as they lie: the mma numbers 2c and 2c + 1 take
// the nibbles {0, 4, 1, 5} and {2, 6, 3, 7} of the c-th 32-bit word of each lane. They are in float16, whose upper byte is
// an E2M1 number but for shifts, and hold every bit of weight, scale and x.

#include "fp4.cuh"

constexpr int THREADS = 608;  // registers decide: a quarter of a multiprocessor has 16,384, for five warps 96 a thread
constexpr int UNITS = 2, UNIT = 128, SLICE = UNITS * UNIT;  // columns of x that a warp owns, and that it reads at once
constexpr int TILE = 16;                                    // rows of W of a stage
constexpr int SUMS = 128;                                   // sums of a tile with 8 rows of x: 4 a lane
constexpr int TURNS = 4;                                    // tiles whose sums may wait for a closer
constexpr int MOST_RANK = 128;
constexpr int AT_ONCE = 16;  // loads of a thread that are on their way

struct Shape {
  int M, N, K, x_stride, R, rank;
  int part_1, part_2;         // first columns of y of the second and third part, N where there are none
  int pieces, stages, warps;  // of K; of the ring; that multiply
  int code_row, scale_row;    // bytes from row to row in shared memory
};

// The nibbles i and i + 4 of a word, times the scale. E2M1 with its sign at the top of a byte and eem in its bits 3 to 1 is
// the upper byte of a float16 that is 2^-14 times too small.
__device__ void unpack(u32 word, u32 scale, u32 (&w)[4]) {
  const u32 odd = (word & 0x80808080u) | (word >> 3 & 0x0E0E0E0Eu), even = (word << 4 & 0x80808080u) | (word << 1 & 0x0E0E0E0Eu);
  w[0] = times(__byte_perm(even, 0, 0x2404), scale), w[1] = times(__byte_perm(odd, 0, 0x2404), scale);
  w[2] = times(even & 0xFF00FF00u, scale), w[3] = times(odd & 0xFF00FF00u, scale);
}

// An E4M3 number >= 0 in both halves, times 2^7: its bits as float16 are 2^-8 of it. With the above 2^-7 remain, exactly.
__device__ u32 scale_pair(u32 byte) { return times(byte * 0x00800080u, 0x78007800u); }

// 8 numbers in the order of the nibbles of a word.
__device__ void ordered(uint4 v, u32 (&w)[4]) {
  w[0] = __byte_perm(v.x, v.z, 0x5410), w[1] = __byte_perm(v.x, v.z, 0x7632);
  w[2] = __byte_perm(v.y, v.w, 0x5410), w[3] = __byte_perm(v.y, v.w, 0x7632);
}

// The columns of x of one unit, zero beyond its rows and columns.
__device__ void load_x(const u16* x, const Shape& s, int column, u32 (&out)[4][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int k = column + t * 32 + c * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (g < s.M && k < s.K) v = *(const uint4*)(x + (long long)g * s.x_stride + k);
    ordered(v, out[c]);
  }
}

// Turn the columns of x that a warp owns to float16, each row times the power of two that brings its largest below 2^15:
// what is 2^-28 of that or more keeps every bit. `back` undoes it in the sums of the rows 2t and 2t + 1.
__device__ void narrow(u32 (&own)[UNITS][4][4], float (&back)[2]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < UNITS * 16; i++) {
    const u32 two = own[i / 16][i / 4 % 4][i % 4];
    largest = max(largest, max(two & 0x7FFFu, two >> 16 & 0x7FFFu));
  }
  for (int lanes = 1; lanes < 4; lanes *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  const u32 power = min(268u - (largest >> 7), 253u);
  const float by = __uint_as_float(power << 23), undo = __uint_as_float(254u - power << 23);
#pragma unroll
  for (int i = 0; i < UNITS * 16; i++) {
    u32& two = own[i / 16][i / 4 % 4][i % 4];
    two = halves(widened(two & 0xFFFF) * by, widened(two >> 16) * by);
  }
  back[0] = of_lane(undo, threadIdx.x % 4 * 8), back[1] = of_lane(undo, threadIdx.x % 4 * 8 + 4);
}

// x A^T of 16 rows of A over one slice of K.
__device__ void shrink(const u16* x, const u16* A, float* inner, const Shape& s, int job, int slices) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = job / slices * TILE, slice = job % slices;
  float sum[4] = {};
  // Registers hold one unit. The lines of the second, one a lane, begin their way from memory with the first.
  prefetch_line(A + (long long)min(first + lane / 2, s.R - 1) * s.K + slice * SLICE + UNIT + lane % 2 * (UNIT / 2));
#pragma unroll 1
  for (int unit = 0; unit < UNITS; unit++) {
    const int column = slice * SLICE + unit * UNIT;
    const u16* low = A + (long long)min(first + g, s.R - 1) * s.K + column + t * 32;
    const u16* high = A + (long long)min(first + g + 8, s.R - 1) * s.K + column + t * 32;
    uint4 a[4], b[4];
#pragma unroll
    for (int c = 0; c < 4; c++) a[c] = *(const uint4*)(low + c * 8), b[c] = *(const uint4*)(high + c * 8);
    u32 own[4][4];
    load_x(x, s, column, own);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      u32 v[4], w[4];
      ordered(a[c], v), ordered(b[c], w);
      mma(sum, v[0], w[0], v[1], w[1], own[c][0], own[c][1]);
      mma(sum, v[2], w[2], v[3], w[3], own[c][2], own[c][3]);
    }
  }
  *(float4*)(inner + job * SUMS + lane * 4) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Where the blocks' parts lie in shared memory, and what a block has to do.
struct Work {
  int piece, team, teams, tiles, first, count, column, columns, slices, stage_bytes;
  float* sums;  // [TURNS][warps][SUMS]
  u16* adapter;
  u32 ring, full, empty, summed, taken;  // barriers, 8 bytes each
};

__device__ Work work_of(const Shape& s, u8* memory) {
  Work w;
  w.piece = blockIdx.x % s.pieces, w.team = blockIdx.x / s.pieces, w.teams = gridDim.x / s.pieces;
  w.tiles = s.N / TILE, w.first = (long long)w.tiles * w.team / w.teams;
  w.count = (long long)w.tiles * (w.team + 1) / w.teams - w.first;
  w.column = w.piece * s.warps * SLICE, w.columns = min(s.K - w.column, s.warps * SLICE);
  w.slices = (s.K + SLICE - 1) / SLICE, w.stage_bytes = TILE * (s.code_row + s.scale_row);
  w.sums = (float*)(memory + s.stages * w.stage_bytes);
  u64* const barriers = (u64*)(w.sums + TURNS * s.warps * SUMS);
  w.adapter = (u16*)(barriers + 2 * s.stages + 2 * TURNS);
  w.ring = shared(memory), w.full = shared(barriers), w.empty = w.full + 8 * s.stages;
  w.summed = w.empty + 8 * s.stages, w.taken = w.summed + 8 * TURNS;
  return w;
}

// Add to `sum` `count` numbers that lie `stride` apart, in order. A 0 in place of one that is not there changes no bit: what
// began at 0 is never -0.
__device__ void add_up(float (&sum)[4], const float4* from, int count, int stride) {
#pragma unroll 1
  for (int left = count; left > 0; left -= AT_ONCE, from += AT_ONCE * stride) {
    float4 one[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) one[i] = i < left ? __ldcg(from + i * stride) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sum[0] += one[i].x, sum[1] += one[i].y, sum[2] += one[i].z, sum[3] += one[i].w;
  }
}

// Where K is cut, x A^T may be late, and every block would read many slices: who brings a tile's last slice adds them up
// for all, in the place of the first.
__device__ void sum_if_last(float* inner, u64* brought, int tile, int slices) {
  const int lane = threadIdx.x % 32;
  u32 last = 0;
  __syncwarp();
  if (lane == 0) __threadfence(), last = (atomicAdd(brought + tile, 1ull) + 1) % slices == 0;
  if (!__shfl_sync(~0u, last, 0)) return;
  __threadfence();
  __syncwarp();
  float sum[4] = {};
  float4* const first = (float4*)inner + tile * slices * (SUMS / 4) + lane;
  add_up(sum, first, slices, SUMS / 4);
  *first = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// t = x A^T in bfloat16, [8, R] with `stride`: the slices' sums, by the closers. Only of the parts that the block's tiles
// lie in, outwards to whole tiles of R; the rest is not written, and not read.
__device__ void sum_slices(const float* inner, const Shape& s, const Work& w, int stride, int thread, int threads) {
  const int from = part_of(s, w.first * TILE) * s.rank / TILE;
  const int to = ((part_of(s, (w.first + w.count - 1) * TILE) + 1) * s.rank + TILE - 1) / TILE;
  for (int v = from * 32 + thread; v < to * 32; v += threads) {
    const int tile = v / 32, lane = v % 32;
    float sum[4] = {};
    add_up(sum, (const float4*)inner + tile * w.slices * (SUMS / 4) + lane, s.pieces > 1 ? 1 : w.slices, SUMS / 4);
    for (int i = 0; i < 4; i++)  // rows beyond R are there, and not read
      w.adapter[(lane % 4 * 2 + i % 2) * stride + tile * TILE + lane / 4 + i / 2 * 8] = rounded(sum[i]);
  }
  sync(1, threads);
}

// What finish adds to a tile: B as it multiplies it, zero beyond the rank, and the bias of its rows g and g + 8.
struct Rest {
  u32 b[MOST_RANK / 16][4];
  float bias[2];
};

// All on its way at once, and while the caller waits for sums.
__device__ void load_rest(Rest& rest, const u16* B, const u16* bias, const Shape& s, int n) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const u16* const low = B + (long long)(n + g) * s.rank + 2 * q;
#pragma unroll
  for (int i = 0; i < MOST_RANK / 16 * 4; i++) {
    const int r = i / 4 * 16 + i % 4 / 2 * 8, row = i % 2 * 8;
    rest.b[i / 4][i % 4] = r + 2 * q < s.rank ? *(const u32*)(low + row * s.rank + r) : 0;
  }
  for (int h = 0; h < 2; h++) rest.bias[h] = bias ? widened(bias[n + g + 8 * h]) : 0.f;
}

// Add bias and adapter to the sums of a tile, and store it.
__device__ void finish(float (&sum)[4], const u16* t, int stride, const Rest& rest, u16* y, const Shape& s, int n) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const u16* const own = t + g * stride + part_of(s, n) * s.rank + 2 * q;
#pragma unroll
  for (int i = 0; i < MOST_RANK / 16; i++) {
    if (i * 16 >= s.rank) continue;
    const u32(&b)[4] = rest.b[i];
    const int left = s.rank - i * 16 - 2 * q;
    mma(sum, b[0], b[1], b[2], b[3], left > 0 ? *(const u32*)(own + i * 16) : 0,
        left > 8 ? *(const u32*)(own + i * 16 + 8) : 0);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = 2 * q + (i & 1), column = n + g + (i & 2) * 4;
    if (m < s.M) y[(long long)m * s.N + column] = rounded(sum[i] + rest.bias[i / 2]);
  }
}

// The carrier: keep the ring full. Each lane has the copy engine bring one row of a tile, its codes or its scales.
__device__ void carry(const u8* codes, const u8* scale, const Shape& s, const Work& w) {
  const int lane = threadIdx.x % 32, row = lane % TILE, a_byte = lane < TILE ? 2 : 16;  // columns of a byte
  const u8* from = (lane < TILE ? codes : scale) + (((long long)w.first * TILE + row) * s.K + w.column) / a_byte;
  const u32 to = w.ring + (lane < TILE ? row * s.code_row : TILE * s.code_row + row * s.scale_row);
  for (int i = 0, stage = 0, parity = 1; i < w.count; i++, from += TILE * s.K / a_byte) {
    const u32 full = w.full + 8 * stage;
    wait(w.empty + 8 * stage, parity);  // the first round finds what no one has used
    if (lane == 0) arrive_expecting(full, TILE * (w.columns / 2 + w.columns / 16));
    __syncwarp();
    copy(to + stage * w.stage_bytes, from, w.columns / a_byte, full);
    if (++stage == s.stages) stage = 0, parity ^= 1;
  }
}

// Each of the first warps: its columns of all tiles.
__device__ void multiply(const u16* x, const u8* memory, const Shape& s, const Work& w, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  awaited();
  u32 own[UNITS][4][4];
#pragma unroll
  for (int unit = 0; unit < UNITS; unit++) load_x(x, s, w.column + warp * SLICE + unit * UNIT, own[unit]);
  float back[2];
  narrow(own, back);
  const u8* const code_at = memory + g * s.code_row + warp * SLICE / 2 + t * 16;
  const u8* const scale_at = memory + TILE * s.code_row + g * s.scale_row + warp * SLICE / 16 + t * 2;
  float* const sums = w.sums + warp * SUMS + lane * 4;
  const bool some = warp * SLICE < w.columns;
  for (int i = 0, stage = 0, parity = 0; i < w.count; i++) {
    wait(w.full + 8 * stage, parity);
    float sum[2][4] = {};  // two chains
    if (some) {
      uint4 word[UNITS][2];
      u32 byte[UNITS][2];
#pragma unroll
      for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          word[unit][h] = *(const uint4*)(code_at + stage * w.stage_bytes + h * 8 * s.code_row + unit * UNIT / 2);
          byte[unit][h] = *(const u16*)(scale_at + stage * w.stage_bytes + h * 8 * s.scale_row + unit * UNIT / 16);
        }
#pragma unroll
      for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          u32 low[4], high[4];
          unpack((&word[unit][0].x)[c], scale_pair(c < 2 ? byte[unit][0] & 0xFF : byte[unit][0] >> 8), low);
          unpack((&word[unit][1].x)[c], scale_pair(c < 2 ? byte[unit][1] & 0xFF : byte[unit][1] >> 8), high);
          mma_half(sum[0], low[0], high[0], low[1], high[1], own[unit][c][0], own[unit][c][1]);
          mma_half(sum[1], low[2], high[2], low[3], high[3], own[unit][c][2], own[unit][c][3]);
        }
    }
    __syncwarp();
    if (lane == 0) arrive(w.empty + 8 * stage);
    if (++stage == s.stages) stage = 0, parity ^= 1;
    const int turn = i % TURNS;
    wait(w.taken + 8 * turn, i / TURNS & 1 ^ 1);
    const float(&a)[4] = sum[0], (&b)[4] = sum[1];
    *(float4*)(sums + turn * s.warps * SUMS) =
        make_float4((a[0] + b[0]) * back[0], (a[1] + b[1]) * back[1], (a[2] + b[2]) * back[0], (a[3] + b[3]) * back[1]);
    __syncwarp();
    if (lane == 0) arrive(w.summed + 8 * turn);
  }
}

// Add up what the warps have of a tile.
__device__ void sum_warps(float (&sum)[4], const Shape& s, const Work& w, int i) {
  const int lane = threadIdx.x % 32, turn = i % TURNS;
  wait(w.summed + 8 * turn, i / TURNS & 1);
#pragma unroll 7
  for (int warp = 0; warp < s.warps; warp++) {
    const float4 one = *(const float4*)(w.sums + (turn * s.warps + warp) * SUMS + lane * 4);
    sum[0] += one.x, sum[1] += one.y, sum[2] += one.z, sum[3] += one.w;
  }
  __syncwarp();
  if (lane == 0) arrive(w.taken + 8 * turn);
}

// The closers: x A^T, then of each tile the sum of the warps, of the pieces, bias and adapter.
__device__ void close(const u16* x, const float* divisor, const u16* A, const u16* B, const u16* bias, u16* y, float* inner,
                      float* partial, u64* counters, const Shape& s, const Work& w, int closer, int closers) {
  const int lane = threadIdx.x % 32, thread = closer * 32 + lane, stride = (s.R + TILE - 1) / TILE * TILE + 8;
  if (thread == 0 && w.count) prefetch(B + (long long)w.first * TILE * s.rank, w.count * TILE * s.rank * 2);
  awaited();
  for (int job = blockIdx.x + gridDim.x * closer; job < (s.R + TILE - 1) / TILE * w.slices; job += gridDim.x * closers) {
    shrink(x, A, inner, s, job, w.slices);
    if (s.pieces > 1) sum_if_last(inner, counters + 1 + w.teams, job / w.slices, w.slices);
  }
  __syncwarp();
  u64 all = 0;
  if (lane == 0) all = arrived(counters, gridDim.x * closers, blockIdx.x == 0 && closer == 0);
  const float factor = 128 / *divisor;
  if (s.pieces == 1) {
    if (lane == 0) await(counters, all);
    sync(1, closers * 32);
    sum_slices(inner, s, w, stride, thread, closers * 32);
  }
  for (int i = closer; i < w.count; i += closers) {
    float sum[4] = {};
    Rest rest;
    if (s.pieces == 1) load_rest(rest, B, bias, s, (w.first + i) * TILE);
    sum_warps(sum, s, w, i);
#pragma unroll
    for (int k = 0; k < 4; k++) sum[k] *= factor;
    if (s.pieces > 1)
      *(float4*)(partial + ((long long)w.piece * w.tiles + w.first + i) * SUMS + lane * 4) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (s.pieces == 1) finish(sum, w.adapter, stride, rest, y, s, (w.first + i) * TILE);
  }
  if (s.pieces == 1) return;
  __syncwarp();
  u64 team = 0;
  if (lane == 0) {
    team = arrived(counters + 1 + w.team, s.pieces * closers, w.piece == 0 && closer == 0);
    await(counters, all);
  }
  sync(1, closers * 32);
  sum_slices(inner, s, w, stride, thread, closers * 32);
  if (lane == 0) await(counters + 1 + w.team, team);
  __syncwarp();
  for (int i = w.piece + closer * s.pieces; i < w.count; i += closers * s.pieces) {
    float sum[4] = {};
    Rest rest;
    load_rest(rest, B, bias, s, (w.first + i) * TILE);
    add_up(sum, (const float4*)partial + (w.first + i) * (SUMS / 4) + lane, s.pieces, w.tiles * (SUMS / 4));
    finish(sum, w.adapter, stride, rest, y, s, (w.first + i) * TILE);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fp4_linear(const u16* x, const u8* codes, const u8* scale, const float* divisor, const u16* A, const u16* B, const u16* bias,
           u16* y, float* inner, float* partial, u64* counters, const Shape s) {
  DYNAMIC_SHARED(memory);
  const int warp = threadIdx.x / 32;
  const Work w = work_of(s, memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.stages; i++) begin(w.full + 8 * i, 1), begin(w.empty + 8 * i, s.warps);
    for (int i = 0; i < TURNS; i++) begin(w.summed + 8 * i, s.warps), begin(w.taken + 8 * i, 1);
    begun();
  }
  __syncthreads();
  next_may_start();
  if (warp < s.warps) multiply(x, memory, s, w, warp);
  else if (warp == s.warps) carry(codes, scale, s, w);
  else close(x, divisor, A, B, bias, y, inner, partial, counters, s, w, warp - s.warps - 1, blockDim.x / 32 - s.warps - 1);
}
