// The Adam kernel over vectors, written once. adam_avx2.cpp and adam_avx512.cpp say what a vector is and instantiate
// it.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It provides
// `F` (a register of floats), `width`, and load, store, set, add, sub, mul, div, sqrt, fma, and the conversions
// load_bfloat16, load_float16, round_bfloat16, round_float16, stream (a vector of 16-bit values, past the cache).
#pragma once

#include "adam_kernel.hpp"

namespace elixir::simd {

template <class Vec, Dtype dtype>
inline typename Vec::F load_grad(const void* grad, std::size_t i) {
    if constexpr (dtype == Dtype::float32) return Vec::load(static_cast<const float*>(grad) + i);
    if constexpr (dtype == Dtype::bfloat16) return Vec::load_bfloat16(static_cast<const std::uint16_t*>(grad) + i);
    if constexpr (dtype == Dtype::float16) return Vec::load_float16(static_cast<const std::uint16_t*>(grad) + i);
}

template <class Vec, Dtype dtype>
inline void stream_compute(void* compute, std::size_t i, typename Vec::F value) {
    [[maybe_unused]] std::uint16_t* const to = static_cast<std::uint16_t*>(compute) + i;
    if constexpr (dtype == Dtype::bfloat16) Vec::stream(to, Vec::round_bfloat16(value));
    if constexpr (dtype == Dtype::float16) Vec::stream(to, Vec::round_float16(value));
}

// How many elements to leave to the scalar kernel until `compute` starts a cache line, as a streamed store needs.
static std::size_t head_numel(const AdamArrays& a, std::size_t begin, std::size_t end) {
    if (a.compute_dtype == Dtype::none) return 0;
    const auto address = reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(a.compute) + begin);
    const std::size_t head = (64 - address % 64) % 64 / 2;
    return head < end - begin ? head : end - begin;
}

/// Updates the whole vectors of [begin, end) and returns where the rest begins.
template <class Vec, Dtype grad_dtype, Dtype compute_dtype>
std::size_t vectors(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    using F = typename Vec::F;
    const F grad_scale = Vec::set(c.grad_scale);
    const F l2_decay = Vec::set(c.l2_decay);
    const F shrink = Vec::set(c.shrink);
    const F lerp_weight = Vec::set(c.lerp_weight);
    const F beta2 = Vec::set(c.beta2);
    const F one_minus_beta2 = Vec::set(c.one_minus_beta2);
    const F sqrt_correction2 = Vec::set(c.sqrt_correction2);
    const F eps = Vec::set(c.eps);
    const F neg_step_size = Vec::set(c.neg_step_size);
    const bool l2 = c.l2_decay != 0.0f;
    const bool from_avg = c.lerp_from_avg;

    std::size_t i = begin;
    for (; i + Vec::width <= end; i += Vec::width) {
        F p = Vec::load(a.master + i);
        F m = Vec::load(a.exp_avg + i);
        F v = Vec::load(a.exp_avg_sq + i);
        F g = Vec::mul(load_grad<Vec, grad_dtype>(a.grad, i), grad_scale);
        if (l2) g = Vec::fma(p, l2_decay, g);
        p = Vec::mul(p, shrink);
        m = Vec::fma(lerp_weight, Vec::sub(g, m), from_avg ? m : g);
        v = Vec::fma(Vec::mul(one_minus_beta2, g), g, Vec::mul(v, beta2));
        const F denominator = Vec::add(Vec::div(Vec::sqrt(v), sqrt_correction2), eps);
        p = Vec::add(p, Vec::div(Vec::mul(neg_step_size, m), denominator));
        Vec::store(a.master + i, p);
        Vec::store(a.exp_avg + i, m);
        Vec::store(a.exp_avg_sq + i, v);
        stream_compute<Vec, compute_dtype>(a.compute, i, p);
    }
    return i;
}

template <class Vec, Dtype grad_dtype>
std::size_t by_compute(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.compute_dtype) {
        case Dtype::bfloat16:
            return vectors<Vec, grad_dtype, Dtype::bfloat16>(a, c, begin, end);
        case Dtype::float16:
            return vectors<Vec, grad_dtype, Dtype::float16>(a, c, begin, end);
        default:
            return vectors<Vec, grad_dtype, Dtype::none>(a, c, begin, end);
    }
}

template <class Vec>
void adam(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    const std::size_t head = head_numel(a, begin, end);
    adam_scalar(a, c, begin, begin + head);
    begin += head;
    switch (a.grad_dtype) {
        case Dtype::bfloat16:
            begin = by_compute<Vec, Dtype::bfloat16>(a, c, begin, end);
            break;
        case Dtype::float16:
            begin = by_compute<Vec, Dtype::float16>(a, c, begin, end);
            break;
        default:
            begin = by_compute<Vec, Dtype::float32>(a, c, begin, end);
            break;
    }
    Vec::fence();  // streamed stores are ordered by nothing else, and another thread reads them next
    adam_scalar(a, c, begin, end);
}

}  // namespace elixir::simd
