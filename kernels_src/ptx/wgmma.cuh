// SPDX-License-Identifier: Apache-2.0
// ptx/wgmma.cuh: asynchronous warpgroup matrix multiply, bf16 operands from shared memory, fp32
// accumulators in registers. Layer: ptx (Hopper only). `scale_d` 0 overwrites the accumulators, 1
// adds to them.
#pragma once
#include "../common/types.cuh"

#define PK_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PK_ACC16(i) PK_ACC4(i), PK_ACC4(i + 4), PK_ACC4(i + 8), PK_ACC4(i + 12)
#define PK_ACC64(i) PK_ACC16(i), PK_ACC16(i + 16), PK_ACC16(i + 32), PK_ACC16(i + 48)

namespace prime::ptx {

// Orders register writes before the first wgmma that reads or accumulates into them.
PK_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PK_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most N of this warpgroup's committed groups are running.
template <int N>
PK_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving reads of an accumulator above the wait that completes it.
PK_DEVICE void wgmma_pin(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

// MnMajorA / MnMajorB: 0 when the operand is contiguous along K, 1 when it is contiguous along M or
// N.
template <int N, int MnMajorA, int MnMajorB>
struct Wgmma;

template <int MnMajorA, int MnMajorB>
struct Wgmma<128, MnMajorA, MnMajorB> {
    PK_DEVICE static void issue(float (&d)[64], u64 desc_a, u64 desc_b, u32 scale_d) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
            : PK_ACC64(0)
            : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(MnMajorA), "n"(MnMajorB));
    }
};

template <int MnMajorA, int MnMajorB>
struct Wgmma<192, MnMajorA, MnMajorB> {
    PK_DEVICE static void issue(float (&d)[96], u64 desc_a, u64 desc_b, u32 scale_d) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
            "}, %96, %97, p, 1, 1, %99, %100;\n}\n"
            : PK_ACC64(0), PK_ACC16(64), PK_ACC16(80)
            : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(MnMajorA), "n"(MnMajorB));
    }
};

template <int MnMajorA, int MnMajorB>
struct Wgmma<256, MnMajorA, MnMajorB> {
    PK_DEVICE static void issue(float (&d)[128], u64 desc_a, u64 desc_b, u32 scale_d) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
            "%111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
            "%126, %127"
            "}, %128, %129, p, 1, 1, %131, %132;\n}\n"
            : PK_ACC64(0), PK_ACC64(64)
            : "l"(desc_a), "l"(desc_b), "r"(scale_d), "n"(MnMajorA), "n"(MnMajorB));
    }
};

}  // namespace prime::ptx

#undef PK_ACC4
#undef PK_ACC16
#undef PK_ACC64
