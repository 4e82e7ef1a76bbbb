// Constants and signatures shared by the kernels of the instruction sets. Included by csrc/adam*.cpp only.
//
// Nothing here may be an inline function: the kernels are compiled for different instruction sets, and the linker keeps
// one copy of an inline function, possibly one that this CPU cannot run.
#pragma once

#include "adam.hpp"

namespace elixir {

/// AdamSettings in the form of the kernels: computed in double, rounded once.
struct AdamConstants {
    float grad_scale;    // negative to maximize
    float l2_decay;      // Adam's weight decay, 0 for none
    float shrink;        // AdamW's 1 - lr * weight_decay, 1 for none
    float lerp_weight;   // 1 - beta1, or -beta1 where lerp starts from the gradient
    bool lerp_from_avg;  // 1 - beta1 < 0.5
    float beta2;
    float one_minus_beta2;
    float sqrt_correction2;
    float one_over_sqrt_correction2;  // for narrow state
    float eps;
    float neg_step_size;
};

/// Updates elements [begin, end).
using AdamKernel = void(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end);

/// Elements in one row of a sum of squares.
constexpr std::size_t kNormRow = 4096;
constexpr std::size_t kNormLanes = 16;

/// The sum of squares of elements [begin, end); `begin` is a multiple of kNormRow.
using NormKernel = double(const void* grad, Dtype dtype, std::size_t begin, std::size_t end);

NormKernel norm_scalar;
NormKernel norm_avx2;
NormKernel norm_avx512;
NormKernel norm_neon;

/// Adds elements [begin, end) of `term` to those of `total`.
using AddKernel = void(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end);

AddKernel add_scalar;
AddKernel add_avx2;
AddKernel add_avx512;
AddKernel add_neon;

AdamKernel adam_scalar;
AdamKernel adam_avx2;
AdamKernel adam_avx512;
AdamKernel adam_neon;

}  // namespace elixir
