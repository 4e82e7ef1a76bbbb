// The reference kernel: one element at a time, for any CPU. The SIMD kernels give the same bits, and use this kernel
// for the elements before and after their blocks.

#include <bit>
#include <cmath>

#include "adam_kernel.hpp"
#include "float16.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

float load(const void* array, Dtype dtype, std::size_t i) {
    if (dtype == Dtype::float32) return static_cast<const float*>(array)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(array)[i];
    return dtype == Dtype::bfloat16 ? std::bit_cast<float>(std::uint32_t{bits} << 16) : from_float16(bits);
}

void store(void* array, Dtype dtype, std::size_t i, float value) {
    static_cast<std::uint16_t*>(array)[i] = dtype == Dtype::bfloat16 ? to_bfloat16(value) : to_float16(value);
}

/// One lane, and halves in pairs.
struct Lane : Vectors<1> {
    static F sqrt(F a) { return F{std::sqrt(a[0])}; }
    static F load_float16(const std::uint16_t* from) { return F{from_float16(*from)}; }
    static HalfH to_float16(F x) { return HalfH{elixir::to_float16(x[0])}; }

    static H widen(Bytes x) { return H{x[0], x[1]}; }
    static I low(H a) { return I{a[0]} << 16; }
    static I high(H a) { return I{a[1]} << 16; }
    static H pack(I low, I high) { return H{static_cast<std::uint16_t>(low[0]), static_cast<std::uint16_t>(high[0])}; }
    static H minus_or_zero(H a, H b) { return larger(a, b) - b; }
    static std::uint32_t largest(H a) { return a[0] > a[1] ? a[0] : a[1]; }
};

}  // namespace

void adam_scalar(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
        float p = a.master[i];
        float m = a.exp_avg[i];
        float v = a.exp_avg_sq[i];
        float g = load(a.grad, a.grad_dtype, i) * c.grad_scale;
        if (c.l2_decay != 0.0f) g = std::fma(p, c.l2_decay, g);
        p = p * c.shrink;
        m = std::fma(c.lerp_weight, g - m, c.lerp_from_avg ? m : g);
        v = std::fma(c.one_minus_beta2 * g, g, v * c.beta2);
        const float denominator = std::sqrt(v) / c.sqrt_correction2 + c.eps;
        p = p + (c.neg_step_size * m) / denominator;
        a.master[i] = p;
        a.exp_avg[i] = m;
        a.exp_avg_sq[i] = v;
        if (a.compute_dtype != Dtype::none) store(a.compute, a.compute_dtype, i, p);
    }
}

void add_scalar(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) total[i] += load(term, dtype, i);
}

double norm_scalar(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    double total = 0.0;
    for (std::size_t row = begin; row < end; row += kNormRow) {
        float sums[kNormLanes] = {};
        const std::size_t stop = row + kNormRow < end ? row + kNormRow : end;
        for (std::size_t i = row; i < stop; ++i) {
            const float x = load(grad, dtype, i);
            sums[(i - row) % kNormLanes] = std::fma(x, x, sums[(i - row) % kNormLanes]);
        }
        for (const float sum : sums) total += sum;
    }
    return total;
}

void narrow_scalar(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Lane>(arrays, constants, begin, end);
}

}  // namespace elixir
