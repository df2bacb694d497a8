// Asynchronous products of a warpgroup; `settled` waits for them. tests/helpers/cuda_on_cpu.h emulates them on a CPU.

struct alignas(64) TensorMap { u64 data[16]; };

// Copy a box of a 16-bit matrix: all rows, columns from 64 * `column`, sized by the tensor map, zeros beyond the matrix.
// Stored 64 columns at a time; 16-byte chunk i of a row is at i ^ row % 8.
__device__ void copy_tile(u32 to, const TensorMap* from, int column, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %2}], [%4];"
               ::"r"(to), "l"(from), "r"(column), "r"(0), "r"(barrier) : "memory");
}

// Copy a box of a matrix from `row` and `column`, sized by the tensor map, zeros beyond the matrix. Row-major, no swizzle.
__device__ void copy_rows(u32 to, const TensorMap* from, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(from), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ void prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Make earlier writes to global memory, by this block or by blocks it waited for, visible to later bulk copies.
__device__ void seen_by_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Load four 8 x 8 matrices of 16-bit numbers as operands of an mma. Lane 8i + r passes the address of row r (16 bytes) of
// matrix i.
__device__ void load_matrices(u32 (&four)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3]) : "r"(from) : "memory");
}

// Store four such matrices, held like an mma's sums, transposed. Lane 8i + r passes the address to which column r
// (16 bytes) of matrix i goes.
__device__ void store_transposed(u32 to, const u32 (&four)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]) : "memory");
}

__device__ u32 rounded_two(float low, float high) {  // to bfloat16
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ bool elected() {  // one lane of the warp
  u32 yes;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, -1;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(yes));
  return yes;
}

__device__ u32 times_bf16(u32 a, u32 b) {  // two bfloat16
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Lower half of the descriptor of an x that copy_tile copied to `at`, in units of 16 bytes. The upper half sets 1,024 bytes
// between groups of 8 rows and a swizzle of 128 bytes.
__device__ u32 matrix(u32 at) { return (at >> 4 & 0x3FFF) | 1u << 16; }

__device__ void begins() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ void committed() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until all but the last `left` committed groups have ended.
template <int left>
__device__ void settled() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Keep the compiler from moving reads of the sums before this point.
template <int count>
__device__ void complete(float (&sum)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// Set the registers per thread of this warpgroup from here on.
template <int count, bool more>
__device__ void registers() {
  if (more) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// sum += A[64, 16] X[16, n]. A is in registers, as for an mma on the warp's 16 rows. X is a `matrix` descriptor, plus 2 for
// each 16 columns. D, A and X are operand numbers; the sums follow.
#define EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define D16 D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA(n, sums, D, A, X, ...) \
  __device__ void wgmma(float (&d)[sums], const u32 (&a)[4], u32 x) { \
    asm volatile("{\n.reg .pred add;\n.reg .b64 x;\nsetp.ne.b32 add, 1, 0;\nmov.b64 x, {" X ", 0x40000040};\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" D "}, {" A "}, x, add, 1, 1, 0;\n}" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x)); \
  }
WGMMA(16, 8, D8, "%8,%9,%10,%11", "%12", EIGHT(0))
WGMMA(32, 16, D16, "%16,%17,%18,%19", "%20", EIGHT(0), EIGHT(8))
WGMMA(64, 32, D32, "%32,%33,%34,%35", "%36", EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24))
