// The reference kernel: one element at a time, for any CPU. The SIMD kernels give the same bits, and use this kernel
// for the elements before and after their blocks.

#include <bit>
#include <cmath>

#include "adam_kernel.hpp"
#include "float16.hpp"
#include "narrow_blocks.hpp"

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

float load(const void* array, Dtype dtype, std::size_t i) {
    if (dtype == Dtype::float32) return static_cast<const float*>(array)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(array)[i];
    return dtype == Dtype::bfloat16 ? from_bfloat16(bits) : from_float16(bits);
}

void store(void* array, Dtype dtype, std::size_t i, float value) {
    static_cast<std::uint16_t*>(array)[i] = dtype == Dtype::bfloat16 ? to_bfloat16(value) : to_float16(value);
}

/// One lane, and halves in pairs.
struct Lane {
    using F = float;
    using I = std::uint32_t;
    struct H {
        std::uint16_t low, high;
    };
    static constexpr std::size_t width = 1;

    static F set(float x) { return x; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return std::sqrt(a); }
    static I bits(F x) { return std::bit_cast<std::uint32_t>(x); }
    static F floats(I x) { return std::bit_cast<float>(x); }

    static I word(std::uint32_t x) { return x; }
    static I low_places() { return 0; }
    static I high_places() { return 1; }
    static I plus(I a, I b) { return a + b; }
    static I times(I a, I b) { return a * b; }
    static I both(I a, I b) { return a & b; }
    static I differ(I a, I b) { return a ^ b; }
    template <int n>
    static I right(I a) {
        return a >> n;
    }
    static I larger(I a, I b) { return a > b ? a : b; }
    static I smaller(I a, I b) { return a < b ? a : b; }
    static I replace_nan(I value, F tested, std::uint32_t by) { return std::isnan(tested) ? by : value; }

    static H half(std::uint16_t x) { return {x, x}; }
    static I low(H a) { return I{a.low} << 16; }
    static I high(H a) { return I{a.high} << 16; }
    static H pack(I low, I high) { return {static_cast<std::uint16_t>(low), static_cast<std::uint16_t>(high)}; }
    static H plus(H a, H b) { return pack(I{a.low} + b.low, I{a.high} + b.high); }
    static H minus_or_zero(H a, H b) {
        return pack(a.low > b.low ? a.low - b.low : 0, a.high > b.high ? a.high - b.high : 0);
    }
    static H both(H a, H b) { return pack(a.low & b.low, a.high & b.high); }
    static H either(H a, H b) { return pack(a.low | b.low, a.high | b.high); }
    static H differ(H a, H b) { return pack(a.low ^ b.low, a.high ^ b.high); }
    template <int n>
    static H right(H a) {
        return pack(a.low >> n, a.high >> n);
    }
    template <int n>
    static H left(H a) {
        return pack(I{a.low} << n, I{a.high} << n);
    }
    static H larger(H a, H b) { return pack(larger(I{a.low}, b.low), larger(I{a.high}, b.high)); }
    static H smaller(H a, H b) { return pack(smaller(I{a.low}, b.low), smaller(I{a.high}, b.high)); }
    static H zero_where_zero(H value, H tested) {
        return pack(tested.low == 0 ? 0 : value.low, tested.high == 0 ? 0 : value.high);
    }
    static std::uint32_t largest(H a) { return larger(I{a.low}, a.high); }

    static Floats<Lane> load_floats(const float* from) { return {from[0], from[1]}; }
    static void store_floats(float* to, Floats<Lane> x) {
        to[0] = x.low;
        to[1] = x.high;
    }
    static Floats<Lane> load_float16s(const std::uint16_t* from) {
        return {from_float16(from[0]), from_float16(from[1])};
    }
    static void store_float16s(std::uint16_t* to, Floats<Lane> x) {
        store_halves(to, pack(to_float16(x.low), to_float16(x.high)));
    }
    static H load_halves(const std::uint16_t* from) { return {from[0], from[1]}; }
    static void store_halves(std::uint16_t* to, H x) {
        to[0] = x.low;
        to[1] = x.high;
    }
    static H load_bytes(const std::uint8_t* from) { return {from[0], from[1]}; }
    static void store_bytes(std::uint8_t* to, H x) {
        to[0] = static_cast<std::uint8_t>(x.low);
        to[1] = static_cast<std::uint8_t>(x.high);
    }
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
