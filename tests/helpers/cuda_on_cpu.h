// Emulate the parts of CUDA that the kernels use on a CPU, for tests: every thread of every block is a fiber. Asynchronous
// operations complete late, as on a GPU: copies after some rounds, warpgroup products at the wait. Memory is always
// consistent, so a missing fence is not detected.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __device__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cvta_generic_to_shared(p) 0
#define DYNAMIC_SHARED(name) u8* const name = current->block->memory.data()
using std::max;
using std::min;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Meeting { u32 here = 0, round = 0; };
struct MBarrier { u32 arrivals = 0, missing = 0, round = 0; long bytes = 0; bool of_copies = false; u32 seen = 0; };
struct Copy { size_t due; u32 barrier; long bytes; std::function<void()> move; };
struct Block {
  std::vector<u8> memory;
  std::vector<Copy> on_their_way;
  size_t running = 0;
  std::map<u32, MBarrier> barriers;
  Meeting meetings[16], of_warps[32];
  u32 operands[32][32][6];
  unsigned x;
};
struct Product { float* sum; int sums; const u32* a; u32 x; };
struct Fiber {
  std::vector<std::vector<Product>> committed;
  std::vector<Product> begun_since;
  std::vector<char> stack;
  jmp_buf at;
  ucontext_t start;
  Block* block;
  unsigned x;
  bool begun = false, done = false;
};
static Fiber* current;
static jmp_buf scheduler;
static std::function<void()> body;
static size_t turn_of_all;
static size_t any(size_t of, size_t below) { return (of * 0x9E3779B97F4A7C15u >> 40) % below; }
static struct { unsigned x; } blockDim, gridDim;
#define threadIdx (*current)
#define blockIdx (*current->block)

static void pause() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}
static void entry() {
  body();
  current->done = true;
  if (--current->block->running) return _longjmp(scheduler, 1);
  for (auto& [at, barrier] : current->block->barriers)
    if (barrier.of_copies && (barrier.bytes || barrier.seen < barrier.round))
      fprintf(stderr, "a block has ended, and no one waited for the last copies to it\n"), abort();
  _longjmp(scheduler, 1);
}
static void move_what_is_due(std::vector<Block>& blocks);
static void run(unsigned blocks, unsigned threads, size_t shared_bytes, std::function<void()> kernel) {
  body = kernel, gridDim.x = blocks, blockDim.x = threads;
  std::vector<Block> all(blocks);
  std::vector<Fiber> fibers(blocks * threads);
  for (unsigned b = 0; b < blocks; b++) all[b].x = b, all[b].running = threads, all[b].memory.assign(shared_bytes, 0xA5);
  for (unsigned i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i];
    f.block = &all[i / threads], f.x = i % threads, f.stack.resize(32768);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.data(), f.start.uc_stack.ss_size = f.stack.size();
    makecontext(&f.start, entry, 0);
  }
  const size_t steps[] = {1, 1009, 4001, 10007};  // a new order each round: no fiber count is a multiple of a step
  for (volatile bool some = true; some; turn_of_all++) {
    some = false;
    move_what_is_due(all);
    for (volatile size_t i = 0; i < fibers.size(); i++) {
      const size_t which = (i + turn_of_all) * steps[turn_of_all % 4] % fibers.size();
      current = &fibers[which];
      if (current->done) continue;
      some = true;
      if (any(which / 32 + turn_of_all / 16 * 997, 4) == 0) continue;  // stall a warp for 16 turns now and then
      if (_setjmp(scheduler)) continue;
      if (current->begun) _longjmp(current->at, 1);
      current->begun = true;
      setcontext(&current->start);
    }
  }
}

static void await(Meeting& m, u32 threads) {
  const u32 round = m.round;
  if (++m.here == threads) m.here = 0, m.round++;
  else while (m.round == round) pause();
}
static void sync(int barrier, int threads) { await(current->block->meetings[barrier], threads); }
static void __syncthreads() { sync(0, blockDim.x); }
static void __syncwarp() { await(current->block->of_warps[current->x / 32], 32); }

static u32 shared(const void* p) { return (u32)((const u8*)p - current->block->memory.data()); }
static MBarrier& at(u32 barrier) { return current->block->barriers[barrier]; }
static void turn(MBarrier& b) {
  if (!b.missing && !b.bytes) b.missing = b.arrivals, b.round++;
}
static void begin(u32 barrier, u32 arrivals) { at(barrier) = {arrivals, arrivals, 0, 0}; }
static void begun() {}
static void arrive(u32 barrier) { at(barrier).missing--, turn(at(barrier)); }
static void arrive_expecting(u32 barrier, u32 bytes) { at(barrier).missing--, at(barrier).bytes += bytes, turn(at(barrier)); }
static void wait(u32 barrier, u32 parity) {
  while ((at(barrier).round & 1) == parity) pause();
  at(barrier).seen = at(barrier).round;
}
static void later(u32 barrier, long bytes, std::function<void()> move) {
  std::vector<Copy>& all = current->block->on_their_way;
  all.push_back({turn_of_all + 1 + any(turn_of_all + all.size(), 40), barrier, bytes, move});
  at(barrier).of_copies = true;
}
static void move_what_is_due(std::vector<Block>& blocks) {
  for (Block& block : blocks) {
    std::vector<Copy> left;
    for (Copy& one : block.on_their_way) {
      if (one.due > turn_of_all) {
        left.push_back(one);
        continue;
      }
      MBarrier& barrier = block.barriers[one.barrier];
      one.move(), barrier.bytes -= one.bytes, turn(barrier);
    }
    block.on_their_way = left;
  }
}
static void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || (size_t)from % 16 || bytes % 16 || to + bytes > current->block->memory.size()) abort();
  u8* const place = current->block->memory.data() + to;
  later(barrier, bytes, [=] { memcpy(place, from, bytes); });
}
struct TensorMap { const u16* numbers; u64 rows, columns, stride, box_rows, box_columns; };
static void copy_tile(u32 to, const TensorMap* from, int column, u32 barrier) {
  if (to % 1024) abort();
  u8* const place = current->block->memory.data() + to;
  later(barrier, from->box_rows * from->box_columns * 128, [=] {
    for (u64 c = 0; c < from->box_columns * 64; c++)
      for (u64 r = 0; r < from->box_rows; r++) {
        const u64 k = column * 64 + c, i = c % 64;
        const u16 number = r < from->rows && k < from->columns ? from->numbers[r * from->stride + k] : 0;
        memcpy(place + (c / 64 * from->box_rows + r) * 128 + ((i / 8) ^ (r % 8)) * 16 + i % 8 * 2, &number, 2);
      }
  });
}
static void copy_rows(u32 to, const TensorMap* from, int column, int row, u32 barrier) {
  if (to % 128) abort();
  u8* const place = current->block->memory.data() + to;
  later(barrier, from->box_rows * from->box_columns * 2, [=] {
    for (u64 r = 0; r < from->box_rows; r++)
      for (u64 c = 0; c < from->box_columns; c++) {
        const bool there = row + r < from->rows && column + c < from->columns;
        const u16 number = there ? from->numbers[(row + r) * from->stride + column + c] : 0;
        memcpy(place + (r * from->box_columns + c) * 2, &number, 2);
      }
  });
}
template <typename T> static void as_given(const T*&, int&) {}
static void prefetch(const TensorMap*) {}
static bool elected() { return current->x % 32 == 0; }
static void prefetch(const void* from, u32 bytes) {
  if ((size_t)from % 16 || bytes % 16) abort();
}
static void awaited() {}
static void next_may_start() {}
static u64 acquired(const u64* p) { return *p; }
static u64 atomicAdd(u64* p, u64 n) { return (*p += n) - n; }
static u64 released(u64* p, u64 n) { return atomicAdd(p, n); }
template <typename T> static T __ldcg(const T* p) { return *p; }

static float __fdividef(float a, float b) { return a / b; }
static float __uint_as_float(u32 bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static u16 rounded(float number) {
  u32 bits;
  memcpy(&bits, &number, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float bfloat16(u32 both, int which) { return __uint_as_float(both >> 16 * which << 16); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = a | (u64)b << 32;
  u32 d = 0;
  for (int i = 0; i < 4; i++) d |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return d;
}
static void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u32(&all)[32][6] = current->block->operands[current->x / 32];
  const u32 lane = current->x % 32, own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(all[lane], own, sizeof own);
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const int of_k = k % 8 / 2, row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      const u32 a = all[row % 8 * 4 + of_k][row / 8 + k / 8 * 2], b = all[column * 4 + of_k][4 + k / 8];
      sum[i] += bfloat16(a, k % 2) * bfloat16(b, k % 2);
    }
  __syncwarp();
}
static u32 __shfl_sync(u32, u32 number, int lane) {
  u32(&all)[32][6] = current->block->operands[current->x / 32];
  all[current->x % 32][0] = number;
  __syncwarp();
  const u32 found = all[lane][0];
  __syncwarp();
  return found;
}

// Warpgroup products: each warp computes its 16 rows at once.
static u32 times_bf16(u32 a, u32 b) {
  return rounded(bfloat16(a, 0) * bfloat16(b, 0)) | (u32)rounded(bfloat16(a, 1) * bfloat16(b, 1)) << 16;
}
static u32 rounded_two(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
static void load_matrices(u32 (&own)[4], u32 from) {
  u32(&all)[32][6] = current->block->operands[current->x / 32];
  const u32 lane = current->x % 32;
  all[lane][0] = from;
  __syncwarp();
  for (u32 i = 0; i < 4; i++) memcpy(own + i, current->block->memory.data() + all[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
  __syncwarp();
}
static void store_transposed(u32 to, const u32 (&own)[4]) {
  u32(&all)[32][6] = current->block->operands[current->x / 32];
  const u32 lane = current->x % 32, matrix = lane / 8;
  memcpy(all[lane], own, sizeof own);
  __syncwarp();
  for (u32 i = 0; i < 8; i++) {
    const u16 number = all[i * 4 + lane % 8 / 2][matrix] >> 16 * (lane % 2);
    memcpy(current->block->memory.data() + to + i * 2, &number, 2);
  }
  __syncwarp();
}
static void seen_by_copies() {}
static u32 matrix(u32 at) { return at / 16; }
static void begins() {}
template <int count> static void complete(float (&)[count]) {}
template <int count, bool more> static void registers() {}
template <int sums>
static void wgmma(float (&sum)[sums], const u32 (&a)[4], u32 x) { current->begun_since.push_back({sum, sums, a, x}); }
static void committed() {
  current->committed.push_back(current->begun_since);
  current->begun_since.clear();
}
static void multiply_now(const Product& p) {
  u32(&all)[32][6] = current->block->operands[current->x / 32];
  const u32 lane = current->x % 32;
  memcpy(all[lane], p.a, 4 * sizeof *p.a);
  __syncwarp();
  for (int i = 0; i < p.sums; i++)
    for (int k = 0; k < 16; k++) {
      const int of_k = k % 8 / 2, row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const u32 line = p.x * 16 + column / 8 * 1024 + column % 8 * 128 + k * 2, at = line ^ (line >> 7 & 7) << 4;
      u16 number;
      memcpy(&number, current->block->memory.data() + at, 2);
      p.sum[i] += bfloat16(all[row % 8 * 4 + of_k][row / 8 + k / 8 * 2], k % 2) * bfloat16(number, 0);
    }
  __syncwarp();
}
template <int left> static void settled() {
  while (current->committed.size() > left) {
    for (const Product& one : current->committed.front()) multiply_now(one);
    current->committed.erase(current->committed.begin());
  }
}
