// Passes over a shard in host memory. The largest is an Adam step: gradient in, master weight and moments updated,
// compute weight out, in one pass.
//
// Knows nothing of Python. Arrays are plain pointers; the caller guarantees their length. Allocates only for threads.
//
// The arithmetic is that of torch.optim.Adam and AdamW (the one-tensor form), operation by operation, with a fused
// multiply-add wherever torch's AVX2 and AVX-512 kernels use one:
//
//     g = grad * grad_scale                       (negated to maximize)
//     g = fma(weight_decay, p, g)                 Adam, where weight_decay is not 0
//     p = p * (1 - lr * weight_decay)             AdamW, where weight_decay is not 0
//     m = fma(1 - beta1, g - m, m)                torch.lerp; starts from g where 1 - beta1 >= 0.5
//     v = fma((1 - beta2) * g, g, beta2 * v)
//     d = sqrt(v) / sqrt(1 - beta2^step) + eps
//     p = p + (-lr / (1 - beta1^step) * m) / d
//     compute = round_to_nearest_even(p)
//
// All scalars are computed in double and rounded once to float, as in torch. Every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elixir {

enum class Dtype : std::uint8_t { none, float32, bfloat16, float16 };

enum class Isa : std::uint8_t { scalar, avx2, avx512, neon };

/// A shard's long-lived state and its gradient, all of `numel` elements, at any alignment.
/// `compute` may be the same memory as `grad` if both have the same element size; no other arrays may overlap.
struct AdamArrays {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    const void* grad;
    void* compute;  // ignored if compute_dtype is none
    Dtype grad_dtype;
    Dtype compute_dtype;  // none, bfloat16 or float16
    std::size_t numel;
};

struct AdamSettings {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    std::int64_t step;  // from 1
    double grad_scale;
    bool decoupled;  // AdamW's weight decay
    bool maximize;
};

/// The best instruction set of this CPU and operating system.
Isa best_isa() noexcept;

/// Whether this CPU and operating system can run the instruction set.
bool can_run(Isa isa) noexcept;

/// Updates the arrays in place with at most `threads` threads, the caller's included; small shards use fewer.
/// `isa` must be one that can_run.
void adam_step(const AdamArrays& arrays, const AdamSettings& settings, Isa isa, int threads);

/// The sum of squares of `numel` elements of a gradient, of any dtype but none: per kNormRow elements, 16 float sums
/// (element i goes to sum i % 16), which are then added in double.
double sum_of_squares(const void* grad, Dtype dtype, std::size_t numel, Isa isa, int threads);

/// Adds `term`, of any dtype but none, to `total`, both of `numel` elements.
void add_to(float* total, const void* term, Dtype dtype, std::size_t numel, Isa isa, int threads);

}  // namespace elixir
