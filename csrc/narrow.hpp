// One Adam step over a shard whose weight and moments have fewer bytes than float: everything read, updated and written
// back in one pass, in blocks that stay in the nearest cache.
//
// Knows nothing of Python. Arrays are plain pointers; the caller guarantees their length. Allocates only for threads.
//
// The arithmetic is Adam's, in float, every operation rounded by itself, so that any device has the same bits:
//
//     g = grad * grad_scale                       (negated to maximize)
//     g = g + p * weight_decay                    Adam, where weight_decay is not 0
//     p = p * (1 - lr * weight_decay)             AdamW, where weight_decay is not 0
//     m = m + (1 - beta1) * (g - m)               from g - beta1 * (g - m) where 1 - beta1 >= 0.5
//     v = v * beta2 + ((1 - beta2) * g) * g
//     d = sqrt(v) * (1 / sqrt(1 - beta2^step)) + eps
//     p = p + (-lr / (1 - beta1^step) * m) / d
//
// Scalars are computed in double and rounded once. Against adam.hpp this saves a division, of three operations that
// wait for the divider. What is stored in fewer bits is rounded stochastically: random bits are added below the last
// bit that is kept, and what is below is cut off. So an update smaller than half a step is not lost, and the expected
// value is exact.
//
//     bfloat16   16 random bits
//     code       8 bits and an exponent, in a byte of its own, for each block of 256 elements. A code is a float with
//                three bits of mantissa, counted down from the largest exponent of its block:
//
//                    q        = bits of |x| >> 20, after 20 random bits were added
//                    exponent = max(q of the block) >> 3
//                    base     = max(8 * exponent + 7 - most, 0)     most = 127 for exp_avg, 255 for exp_avg_sq
//                    code     = q - base, 0 at least                exp_avg: and the sign in the upper bit, but for 0
//                               q - base, 1 at least, 0 for 0       exp_avg_sq
//
//                Scales are powers of two: a block whose largest element changes keeps the grid of all others, and a
//                value on the grid is never rounded again. A code reaches from 2^-15 (exp_avg) and 2^-31 (exp_avg_sq)
//                of the block's largest element up. Nothing encodes a second moment above zero as zero.
//
// Random bits depend on (key, index of the element) alone, whatever the threads and the instruction set. One word of 32
// bits serves all three; none shares its upper bits, which decide, with another:
//
//                  weight     exp_avg    exp_avg_sq
//     codes        0 .. 15    0 .. 19    12 .. 31
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
