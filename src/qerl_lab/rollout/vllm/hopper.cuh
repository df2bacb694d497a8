// Wrappers of PTX instructions, for compute capability 9.0 and later. Addresses and barriers in shared memory are 32-bit
// shared-memory addresses. tests/helpers/cuda_on_cpu.h emulates them on a CPU.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) u8 name[]

__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ void begin(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ void begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}

__device__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ void prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ void sync(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

__device__ void pause() {}

// Hide both values' origin from the compiler.
template <typename T>
__device__ void as_given(const T*& p, int& n) { asm volatile("" : "+l"(p), "+r"(n)); }

// Wait for the previous launch. Only after this may its output be read and its input be overwritten.
__device__ void awaited() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ u64 acquired(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// Add n and return the old value. Earlier writes of this thread are visible to threads that acquire the new value.
__device__ u64 released(u64* p, u64 n) {
  u64 before;
  asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(p), "l"(n) : "memory");
  return before;
}

__device__ u16 rounded(float number) {
  u16 d;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(number));
  return d;
}

// sum += A[16, 16] B[16, 8], in bfloat16
__device__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
