// The copy engine: tiles through tensor maps, rows through bulk copies.
#pragma once
#include "ptx/base.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

namespace ptx {

// A box at column x, row y into shared memory; `bar` counts its bytes.
__device__ __forceinline__ void tile_load(void* to, const TensorMap* map, u64* bar, u32 x, u32 y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem_address(to)),
        "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y) : "memory");
}
// Contiguous bytes, a multiple of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "r"(bytes), "r"(smem_address(bar)) : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the last N groups have read their source, or are wholly done.
template <u32 N> __device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <u32 N> __device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

}  // namespace ptx
