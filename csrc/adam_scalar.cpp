// The reference kernel: one element at a time, for any CPU. The SIMD kernels give the same bits, and use this kernel
// for the elements before and after their blocks.

#include <bit>
#include <cmath>

#include "adam_kernel.hpp"

namespace elixir {
namespace {

float from_bfloat16(std::uint16_t bits) {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

std::uint16_t to_bfloat16(float value) {
    if (std::isnan(value)) return 0x7fc0;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t to_even = 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>((bits + to_even) >> 16);
}

float from_float16(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1f;
    const std::uint32_t mantissa = half & 0x3ff;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and the subnormals, exactly
    return sign ? -magnitude : magnitude;
}

std::uint16_t to_float16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t magnitude = bits & 0x7fffffff;
    std::uint32_t half;
    if (magnitude > 0x7f800000) {
        half = 0x7e00 | ((magnitude >> 13) & 0x3ff);  // a quiet NaN with the upper bits of its payload
    } else if (magnitude >= 0x477ff000) {
        half = 0x7c00;  // 65520 and above round to infinity
    } else if (magnitude < 0x38800000) {
        // Below 2^-14, halves are 2^-24 apart, like floats just above 0.5: the addition rounds to even.
        const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
        half = std::bit_cast<std::uint32_t>(aligned) - 0x3f000000;
    } else {
        const std::uint32_t to_even = 0xfff + ((magnitude >> 13) & 1);
        half = (magnitude + to_even - (112u << 23)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

float load(const void* array, Dtype dtype, std::size_t i) {
    if (dtype == Dtype::float32) return static_cast<const float*>(array)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(array)[i];
    return dtype == Dtype::bfloat16 ? from_bfloat16(bits) : from_float16(bits);
}

void store(void* array, Dtype dtype, std::size_t i, float value) {
    static_cast<std::uint16_t*>(array)[i] = dtype == Dtype::bfloat16 ? to_bfloat16(value) : to_float16(value);
}

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

}  // namespace elixir
