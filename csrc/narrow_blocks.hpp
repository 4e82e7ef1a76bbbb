// The kernel for narrow state, written once over vectors. adam_scalar.cpp instantiates it with one lane, which is the
// reference; adam_avx2.cpp and adam_avx512.cpp with theirs, and with one lane for the end of a shard.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It provides
// `F` and `I` (registers of floats and of 32-bit words), `width`, and the operations used below. Everything here is in
// an unnamed namespace for the same reason.
//
// Codes take two passes over a block of 256 elements, since its largest element is known only after the first; what
// the first leaves stays in the nearest cache. With 10 bytes an element (bf16 weight and gradient, codes) instead of
// 28, what costs time is arithmetic, divisions above all, and no longer memory.
#pragma once

#include <bit>
#include <cmath>

#include "float16.hpp"
#include "narrow_kernel.hpp"

namespace elixir {
namespace {

/// One lane.
struct Lane {
    using F = float;
    using I = std::uint32_t;
    static constexpr std::size_t width = 1;

    static F load(const float* from) { return *from; }
    static void store(float* to, F x) { *to = x; }
    static F set(float x) { return x; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return std::sqrt(a); }

    static I word(std::uint32_t x) { return x; }
    static I count_from(std::uint32_t first) { return first; }
    static I load_words(const std::uint32_t* from) { return *from; }
    static void store_words(std::uint32_t* to, I x) { *to = x; }
    static I plus(I a, I b) { return a + b; }
    static I minus(I a, I b) { return a - b; }
    static I times(I a, I b) { return a * b; }
    static I both(I a, I b) { return a & b; }
    static I either(I a, I b) { return a | b; }
    static I differ(I a, I b) { return a ^ b; }
    template <int n>
    static I right(I a) {
        return a >> n;
    }
    template <int n>
    static I left(I a) {
        return a << n;
    }
    static I larger(I a, I b) { return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? a : b; }
    static I zero_where_zero(I value, I tested) { return tested == 0 ? 0 : value; }
    static I replace_nan(I value, F tested, std::uint32_t by) { return std::isnan(tested) ? by : value; }
    static std::uint32_t largest(I a) { return a; }

    static I bits(F x) { return std::bit_cast<std::uint32_t>(x); }
    static F floats(I x) { return std::bit_cast<float>(x); }
    static I load_bytes(const std::uint8_t* from) { return *from; }
    static void store_bytes(std::uint8_t* to, I x) { *to = static_cast<std::uint8_t>(x); }
    static I load_halves(const std::uint16_t* from) { return *from; }
    static void store_halves(std::uint16_t* to, I x) { *to = static_cast<std::uint16_t>(x); }
    static F widen_float16(const std::uint16_t* from) { return from_float16(*from); }
    static void narrow_float16(std::uint16_t* to, F x) { *to = to_float16(x); }
};

template <class V>
inline typename V::I draw(const NarrowArrays& a, std::size_t i) {
    auto x = V::differ(V::count_from(a.first + static_cast<std::uint32_t>(i)), V::word(a.key[0]));
    x = V::times(V::differ(x, V::template right<16>(x)), V::word(0x7feb352d));
    x = V::differ(x, V::word(a.key[1]));
    x = V::times(V::differ(x, V::template right<15>(x)), V::word(0x846ca68b));
    return V::differ(x, V::template right<16>(x));
}

template <class V>
inline typename V::I nearest_bfloat16(typename V::F x) {
    const auto bits = V::bits(x);
    const auto odd = V::both(V::template right<16>(bits), V::word(1));
    const auto rounded = V::template right<16>(V::plus(bits, V::plus(odd, V::word(0x7fff))));
    return V::replace_nan(rounded, x, 0x7fc0);
}

/// The upper half of a float after random bits were added to the lower one. A NaN stays one: the lower half of what
/// arithmetic makes of bf16 is 0.
template <class V>
inline typename V::I random_bfloat16(typename V::F x, typename V::I random) {
    return V::template right<16>(V::plus(V::bits(x), random));
}

template <class V, Dtype dtype>
inline typename V::F widen(const void* from, std::size_t i) {
    if constexpr (dtype == Dtype::float32) return V::load(static_cast<const float*>(from) + i);
    const auto* halves = static_cast<const std::uint16_t*>(from) + i;
    if constexpr (dtype == Dtype::bfloat16) return V::floats(V::template left<16>(V::load_halves(halves)));
    if constexpr (dtype == Dtype::float16) return V::widen_float16(halves);
}

constexpr std::uint32_t kMostAvg = 127, kMostSq = 255;

inline std::uint32_t base_of(std::uint32_t exponent, std::uint32_t most) {
    const std::uint32_t top = 8 * exponent + 7;
    return top > most ? top - most : 0;
}

/// What a block of codes needs besides them: the steps below its first code, and the new numbers of steps, q of
/// narrow.hpp, with the sign in the upper bit.
struct alignas(64) Block {
    std::uint32_t base_avg, base_sq;
    std::uint32_t q_avg[kCodeBlock], q_sq[kCodeBlock];
};

template <class V>
inline typename V::F decode_avg(const NarrowArrays& a, const Block& block, std::size_t i) {
    const auto code = V::load_bytes(static_cast<const std::uint8_t*>(a.exp_avg) + i);
    const auto size = V::both(code, V::word(kMostAvg));
    const auto bits = V::zero_where_zero(V::template left<20>(V::plus(size, V::word(block.base_avg))), size);
    return V::floats(V::either(bits, V::template left<24>(V::minus(code, size))));
}

template <class V>
inline typename V::F decode_sq(const NarrowArrays& a, const Block& block, std::size_t i) {
    const auto code = V::load_bytes(static_cast<const std::uint8_t*>(a.exp_avg_sq) + i);
    return V::floats(V::zero_where_zero(V::template left<20>(V::plus(code, V::word(block.base_sq))), code));
}

/// Updates elements from i on, a vector of them, `at` being the first of the block; codes are left as numbers of steps.
template <class V, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
inline void update(const NarrowArrays& a, const AdamConstants& c, Block& block, std::size_t at, std::size_t i,
                   typename V::I& top_avg, typename V::I& top_sq) {
    constexpr Dtype moments_dtype = moments == Moments::float32 ? Dtype::float32 : Dtype::bfloat16;
    auto g = V::mul(widen<V, grad_dtype>(a.grad, i), V::set(c.grad_scale));
    auto p = widen<V, weight_dtype>(a.weight, i);
    typename V::F m, v;
    if constexpr (moments == Moments::code) {
        m = decode_avg<V>(a, block, i);
        v = decode_sq<V>(a, block, i);
    } else {
        m = widen<V, moments_dtype>(a.exp_avg, i);
        v = widen<V, moments_dtype>(a.exp_avg_sq, i);
    }
    if (c.l2_decay != 0.0f) g = V::add(g, V::mul(p, V::set(c.l2_decay)));
    p = V::mul(p, V::set(c.shrink));
    m = V::add(c.lerp_from_avg ? m : g, V::mul(V::set(c.lerp_weight), V::sub(g, m)));
    v = V::add(V::mul(v, V::set(c.beta2)), V::mul(V::mul(V::set(c.one_minus_beta2), g), g));
    const auto denominator = V::add(V::mul(V::sqrt(v), V::set(c.one_over_sqrt_correction2)), V::set(c.eps));
    p = V::add(p, V::div(V::mul(V::set(c.neg_step_size), m), denominator));

    const auto random = draw<V>(a, i);
    if constexpr (weight_dtype == Dtype::bfloat16) {
        const auto half = random_bfloat16<V>(p, V::both(random, V::word(0xffff)));
        V::store_halves(static_cast<std::uint16_t*>(a.weight) + i, half);
    } else {
        V::store(static_cast<float*>(a.weight) + i, p);
        auto* halves = static_cast<std::uint16_t*>(a.compute) + i;
        if (a.compute_dtype == Dtype::bfloat16) V::store_halves(halves, nearest_bfloat16<V>(p));
        if (a.compute_dtype == Dtype::float16) V::narrow_float16(halves, p);
    }
    if constexpr (moments == Moments::code) {
        const auto sign = V::both(V::bits(m), V::word(0x80000000));
        const auto size = V::minus(V::bits(m), sign);
        const auto q = V::template right<20>(V::plus(size, V::both(random, V::word(0xfffff))));
        V::store_words(block.q_avg + (i - at), V::either(q, sign));
        top_avg = V::larger(top_avg, q);
        const auto q_sq = V::template right<20>(V::plus(V::bits(v), V::template right<12>(random)));
        V::store_words(block.q_sq + (i - at), V::zero_where_zero(V::larger(q_sq, V::word(1)), V::bits(v)));
        top_sq = V::larger(top_sq, q_sq);
    } else if constexpr (moments == Moments::bfloat16) {
        const auto half = random_bfloat16<V>(m, V::both(V::template right<8>(random), V::word(0xffff)));
        V::store_halves(static_cast<std::uint16_t*>(a.exp_avg) + i, half);
        const auto half_sq = V::larger(random_bfloat16<V>(v, V::template right<16>(random)), V::word(1));
        V::store_halves(static_cast<std::uint16_t*>(a.exp_avg_sq) + i, V::zero_where_zero(half_sq, V::bits(v)));
    } else {
        V::store(static_cast<float*>(a.exp_avg) + i, m);
        V::store(static_cast<float*>(a.exp_avg_sq) + i, v);
    }
}

template <class V>
inline void encode(const NarrowArrays& a, const Block& block, std::size_t at, std::size_t i) {
    const auto q = V::load_words(block.q_avg + (i - at));
    const auto size = V::larger(V::minus(V::both(q, V::word(0x7fffffff)), V::word(block.base_avg)), V::word(0));
    const auto sign = V::both(V::template right<24>(q), V::word(128));
    V::store_bytes(static_cast<std::uint8_t*>(a.exp_avg) + i, V::zero_where_zero(V::either(size, sign), size));
    const auto q_sq = V::load_words(block.q_sq + (i - at));
    const auto code = V::larger(V::minus(q_sq, V::word(block.base_sq)), V::word(1));
    V::store_bytes(static_cast<std::uint8_t*>(a.exp_avg_sq) + i, V::zero_where_zero(code, q_sq));
}

/// Updates the block of elements [at, end).
template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_block(const NarrowArrays& a, const AdamConstants& c, std::size_t at, std::size_t end) {
    Block block;
    if constexpr (moments == Moments::code) {
        block.base_avg = base_of(a.exponents_avg[at / kCodeBlock], kMostAvg);
        block.base_sq = base_of(a.exponents_sq[at / kCodeBlock], kMostSq);
    }
    auto top_avg = Vec::word(0), top_sq = Vec::word(0);
    std::uint32_t rest_avg = 0, rest_sq = 0;
    std::size_t i = at;
    for (; i + Vec::width <= end; i += Vec::width)
        update<Vec, moments, weight_dtype, grad_dtype>(a, c, block, at, i, top_avg, top_sq);
    const std::size_t whole = i;
    if constexpr (Vec::width > 1) {
        for (; i < end; ++i) update<Lane, moments, weight_dtype, grad_dtype>(a, c, block, at, i, rest_avg, rest_sq);
    }
    if constexpr (moments == Moments::code) {
        const std::uint32_t exponent_avg = Lane::larger(Vec::largest(top_avg), rest_avg) >> 3;
        const std::uint32_t exponent_sq = Lane::larger(Vec::largest(top_sq), rest_sq) >> 3;
        a.exponents_avg[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_avg);
        a.exponents_sq[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_sq);
        block.base_avg = base_of(exponent_avg, kMostAvg);
        block.base_sq = base_of(exponent_sq, kMostSq);
        for (i = at; i < whole; i += Vec::width) encode<Vec>(a, block, at, i);
        for (; i < end; ++i) encode<Lane>(a, block, at, i);
    }
}

template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_blocks(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    // Local copies: the compiler knows that no store below changes them.
    const NarrowArrays a = arrays;
    const AdamConstants c = constants;
    for (std::size_t at = begin; at < end; at += kCodeBlock) {
        update_block<Vec, moments, weight_dtype, grad_dtype>(a, c, at, end - at < kCodeBlock ? end : at + kCodeBlock);
    }
}

template <class Vec, Moments moments, Dtype weight_dtype>
void by_grad_dtype(const NarrowArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.grad_dtype) {
        case Dtype::bfloat16:
            return update_blocks<Vec, moments, weight_dtype, Dtype::bfloat16>(a, c, begin, end);
        case Dtype::float16:
            return update_blocks<Vec, moments, weight_dtype, Dtype::float16>(a, c, begin, end);
        default:
            return update_blocks<Vec, moments, weight_dtype, Dtype::float32>(a, c, begin, end);
    }
}

template <class Vec, Moments moments>
void by_weight_dtype(const NarrowArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    if (a.weight_dtype == Dtype::bfloat16) return by_grad_dtype<Vec, moments, Dtype::bfloat16>(a, c, begin, end);
    by_grad_dtype<Vec, moments, Dtype::float32>(a, c, begin, end);
}

/// The whole kernel, a block after another.
template <class Vec>
void narrow_all(const NarrowArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.moments) {
        case Moments::code:
            return by_weight_dtype<Vec, Moments::code>(a, c, begin, end);
        case Moments::bfloat16:
            return by_weight_dtype<Vec, Moments::bfloat16>(a, c, begin, end);
        default:
            return by_weight_dtype<Vec, Moments::float32>(a, c, begin, end);
    }
}

}  // namespace
}  // namespace elixir
