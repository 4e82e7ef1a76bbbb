// One Adam step over a shard whose weight and moments have fewer bytes than float: everything read, updated and written
// back in one pass, in blocks that stay in the nearest cache.
//
// Knows nothing of Python. Arrays are plain pointers; the caller guarantees their length. Allocates only for threads.
//
// The arithmetic is Adam's, in float, with each operation rounded separately, so that every device has the same bits:
//
//     g = grad * grad_scale                       (negated to maximize)
//     g = g + p * weight_decay                    Adam, where weight_decay is not 0
//     p = p * (1 - lr * weight_decay)             AdamW, where weight_decay is not 0
//     m = m + (1 - beta1) * (g - m)               from g - beta1 * (g - m) where 1 - beta1 >= 0.5
//     v = v * beta2 + ((1 - beta2) * g) * g
//     d = sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps
//     p = p + (-lr / (1 - beta1^step) * m) / d
//
// Scalars are computed in double and rounded once. Compared with adam.hpp this saves one of three operations that wait
// for the divider. Values stored in fewer bits are rounded stochastically: random bits are added below the last bit
// that is kept, and the rest is truncated. So an update smaller than half a step is not lost, and the expected value is
// exact.
//
//     bfloat16   16 random bits
//     code       8 bits. Each block of 256 elements has an exponent, in a separate byte. A code is a float whose
//                exponent counts down from the largest exponent of its block.
//
//                               exp_avg                 exp_avg_sq
//                    x          |m|                     u = sqrt(sqrt(v)); v = (u * u) * (u * u), exactly
//                    shift      20: 3 mantissa bits     18: 5 mantissa bits
//                    half       64, and a sign bit      128
//
//                    q        = bits of x >> shift, after `shift` random bits were added
//                    exponent = max(q of the block) without its mantissa bits
//                    fine     = first q of the upper 8 octaves of m, or 4 of u
//                    code     = q - fine + half                         from fine on
//                               (q + two bits >> 2) - fine / 4 + half   below: two bits of mantissa fewer
//
//                The two bits are random per block: those of its first element, incremented for each further element.
//
//                So codes are fine for gradients from 2^-8 of the block's largest up, and coarse down to 2^-39. Below
//                that a first moment is 0. A second moment above zero never becomes 0: it gets the smallest code, or
//                that of 2^-124, below which the products underflow. Scales are powers of two: if the largest element
//                of a block changes, the grid of all others stays, and a value on a grid is not rounded again.
//
//                Why the fourth root: stochastic rounding keeps the mean of the rounded value, here of a first moment.
//                If v were rounded, its errors would accumulate over a thousand steps, and 1 / sqrt(v) would be too
//                large by 3/8 of their variance V, on average. Rounding v^a leaves (a / 2 - 1 / 8) V: 0 for a = 1/4.
//
// Random bits depend only on (key, index of the element), not on threads or instruction set. One word of 32 bits serves
// all three; their upper bits, which decide, do not overlap:
//
//                  weight     exp_avg    exp_avg_sq
//     codes        0 .. 15    0 .. 19    14 .. 31
//     blocks                  20, 21     0, 1
//     bfloat16     0 .. 15    8 .. 23    16 .. 31
//
// The word is the 32-bit finalizer "lowbias32" of C. Wellons (hash-prospector, 2018) of index ^ key[0], with key[1]
// between its two products. Every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adam.hpp"

namespace elixir {

/// Elements of a block of codes. Blocks are counted from the first element of the arrays.
constexpr std::size_t kCodeBlock = 256;

enum class Moments : std::uint8_t { float32, bfloat16, code };

/// A shard's long-lived state and its gradient, all of `numel` elements, at any alignment; they do not overlap.
struct NarrowArrays {
    void* weight;
    void* exp_avg;
    void* exp_avg_sq;
    std::uint8_t* exponents_avg;  // one for each block of codes, and none otherwise
    std::uint8_t* exponents_sq;
    const void* grad;
    void* compute;       // ignored if compute_dtype is none
    Dtype weight_dtype;  // float32, or bfloat16: rounded stochastically
    Moments moments;
    Dtype grad_dtype;
    Dtype compute_dtype;  // none, bfloat16 or float16: rounded to nearest even
    std::size_t numel;
    std::uint32_t key[2];
    std::uint32_t first;  // index of the first element, modulo 2^32
};

/// Updates the arrays in place; the rest is as for adam_step.
void narrow_step(const NarrowArrays& arrays, const AdamSettings& settings, Isa isa, int threads);

}  // namespace elixir
