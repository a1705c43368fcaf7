// SPDX-License-Identifier: Apache-2.0
// moe/gemm_args.cuh: arguments of the grouped GEMMs.
//
// Layer:      moe. Shapes and boxes of the tensor maps are stated here and made in
//             prime_kernels/moe/cuda_maps.py.
#pragma once
#include "../comm/peers.cuh"
#include "../common/fault.cuh"
#include "../common/types.cuh"

namespace prime::moe {

// Tensor maps, all bf16 with the 128-byte swizzle: "rows" are 2-D [columns, rows], box {64, 64};
// "halves" 3-D [I, 2, rows], box {64, 1, 64}; K-major weights 4-D [k, n, 1, expert], box
// {64, 128, 1, 1}; MN-major ones 4-D [64, k, n/64, expert], box {64, 64, 2, 1}.

// One GEMM with rows grouped by expert.
struct GroupedArgs {
    TensorMap a;             // rows: activations
    TensorMap b0;            // weights; the gate half where there are two
    TensorMap b1;            // the up half, or b0 again
    TensorMap out0;          // rows: the main result
    TensorMap out1;          // halves: z (gate/up) or dz (down gradient)
    TensorMap in1;           // halves: z read (down gradient)
    const i32* counts;       // [E_l] rows per expert
    const i32* starts;       // [E_l + 1] first pool row per expert, multiples of 64
    const float* row_score;  // [pool rows]
    float* score_parts;      // [pool rows, n_tiles] partial sums of <dh', h>
    const u8* pull_src;      // [T, pull_bytes] rows to copy to the pool meanwhile, or null
    u8* pull_dst;            // [pool rows, pull_bytes]
    const i32* row_src;      // [pool rows] token of a row, -1: padding
    u32* arrivals;           // [pool rows / 64], when `a` is what is pulled; else null
    FaultRecord* fault;
    const comm::RowEntry* list;  // [pool rows] whose token a row is; from here on among peers only
    const comm::Peers* peers;    // in this rank's arena
    u32* copied;                 // [pool rows / 64] rows that are pulled, whoever waits for them
    const u8* out_rows;  // [pool rows, columns] what out0 writes: peers' rows are sent from there
    u32* out_done;       // [pool rows / 64] tiles of it that are there
    u32* finished;       // [1] CTAs that are through
    u32 num_experts;
    u32 k_steps;  // 64-wide steps of the whole reduction
    u32 split;    // steps that read b0; the rest read b1
    u32 columns;  // columns of the output (of one half where there are two)
    u32 n_tiles;
    u32 keep_z;  // gate/up: also write z
    u32 pull_bytes;
    u32 pull_grads;  // 1: dy is pulled, 0: x
    u32 parts;       // of a score's gradient
    float alpha;
    float clamp;
    float up_offset;
};

// Both GEMMs of the forward in one launch, among peers.
struct ForwardArgs {
    TensorMap x;  // rows, in pool order
    TensorMap gate;
    TensorMap up;
    TensorMap h;  // rows: written, then read
    TensorMap z;  // halves
    TensorMap down;
    TensorMap y;                 // rows: times their scores
    const i32* counts;           // [E_l]
    const i32* starts;           // [E_l + 1]
    const comm::RowEntry* list;  // [pool rows] whose token a row is
    const comm::Peers* peers;    // in this rank's arena
    const float* row_score;      // [pool rows]
    u8* pool;                    // [pool rows, H] where tokens are brought
    const u8* y_rows;            // [pool rows, H] what y writes: peers' rows are sent from there
    u32* arrivals;               // [pool rows / 64] tokens that are there
    u32* h_done;                 // [pool rows / 64] tiles of h that are there
    u32* y_done;                 // [pool rows / 64] tiles of y that are there
    u32* finished;               // [1] CTAs that are through
    FaultRecord* fault;
    u32 num_experts;  // E_l
    u32 hidden;
    u32 intermediate;
    u32 lag;  // experts that the second GEMM stays behind the first
    u32 keep_z;
    u32 only_moves;  // 1: there are no tiles, which leaves the time of the transport
    u32 reserved;
    float alpha;
    float clamp;
    float up_offset;
};

// Reductions over rows. A and B maps are MN-major 4-D [64, rows, columns/64, 1] with box {64, 64,
// 2}.
struct WgradArgs {
    TensorMap a0;    // dz, for the gate/up gradient
    TensorMap b0;    // x rows
    TensorMap a1;    // dy rows, for the down gradient
    TensorMap b1;    // score * h
    TensorMap gate;  // 3-D [H, I, expert], box {64, 64} bf16 or {32, 64} fp32
    TensorMap up;
    TensorMap down;  // 3-D [I, H, expert]
    const i32* counts;
    const i32* starts;
    FaultRecord* fault;
    u8* gate_sum;  // the fp32 memory behind `gate`, `up` and `down`; read by the adding kernel only
    u8* up_sum;
    u8* down_sum;
    u64 gate_up_matrix;  // bytes from an expert's gradient to the next one's, and of a row
    u64 down_matrix;
    u32 gate_up_pitch;
    u32 down_pitch;
    u32 num_experts;
    u32 hidden;
    u32 intermediate;
    u32 do_gate_up;  // 0: the caller wants no gradient of these weights
    u32 do_down;
    u32 reserved;
};

}  // namespace prime::moe
