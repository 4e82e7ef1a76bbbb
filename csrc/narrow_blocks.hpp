// The kernel for narrow state, written once over vectors. adam_scalar.cpp instantiates it with one lane, which is the
// reference; adam_avx2.cpp, adam_avx512.cpp and adam_neon.cpp with theirs.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It provides
// `F` and `I` (registers of `width` floats and 32-bit words), `H` (a register of 2 * width halves of 16 bits), and the
// operations used below. Everything here is in an unnamed namespace for the same reason.
//
// With 10 bytes an element (bf16 weight and gradient, codes) instead of 28, what costs time is arithmetic and no longer
// memory. So whatever has 16 bits or fewer is handled in registers of halves, of which one instruction takes twice as
// many. A bf16 number is widened by putting zeros below it, and codes are bf16 numbers. Widening and packing stay
// within parts of 128 bits, where they take one instruction each: `low` and `high` are the first and the second four
// halves of each such part, and `pack` undoes it. Only what has 32 bits in memory is put into this order (`load`) and
// back (`store`).
//
// Codes take two passes over a block of 256 elements, since its largest element is known only after the first; what
// the first leaves stays in the nearest cache. Blocks are always whole: the last of a shard is filled up with zeros,
// which no code notices.
#pragma once

#include <cstring>

#include "narrow_kernel.hpp"

namespace elixir {
namespace {

/// 2 * width elements, in the order of `Vec::low` and `Vec::high`.
template <class V>
struct Floats {
    typename V::F low, high;
};

/// The random words of elements from i on.
template <class V>
inline typename V::I draw(const NarrowArrays& a, typename V::I places, std::size_t i) {
    auto x = V::differ(V::plus(V::word(a.first + static_cast<std::uint32_t>(i)), places), V::word(a.key[0]));
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

/// A second moment above zero is not rounded to zero: `rounded`, or 1 if that is 0 and x is not.
template <class V>
inline typename V::I above_zero(typename V::I rounded, typename V::F x) {
    return V::larger(rounded, V::smaller(V::bits(x), V::word(1)));
}

template <class V>
inline Floats<V> widen(typename V::H bfloat16) {
    return {V::floats(V::low(bfloat16)), V::floats(V::high(bfloat16))};
}

template <class V, Dtype dtype>
inline Floats<V> load(const void* from, std::size_t i) {
    if constexpr (dtype == Dtype::float32) return V::load_floats(static_cast<const float*>(from) + i);
    const auto* halves = static_cast<const std::uint16_t*>(from) + i;
    if constexpr (dtype == Dtype::bfloat16) return widen<V>(V::load_halves(halves));
    if constexpr (dtype == Dtype::float16) return V::load_float16s(halves);
}

constexpr std::uint32_t kMostAvg = 127, kMostSq = 255;

inline std::uint16_t base_of(std::uint32_t exponent, std::uint32_t most) {
    const std::uint32_t top = 8 * exponent + 7;
    return static_cast<std::uint16_t>(top > most ? top - most : 0);
}

/// The steps below the first code of a block.
template <class V>
struct Bases {
    typename V::H avg, sq;
};

template <class V>
inline Bases<V> bases_of(std::uint32_t exponent_avg, std::uint32_t exponent_sq) {
    return {V::half(base_of(exponent_avg, kMostAvg)), V::half(base_of(exponent_sq, kMostSq))};
}

/// The new numbers of steps of a block, q of narrow.hpp; that of exp_avg with the sign in bit 11.
struct Steps {
    alignas(64) std::uint16_t avg[kCodeBlock];
    alignas(64) std::uint16_t sq[kCodeBlock];
};
constexpr std::uint16_t kSteps = 0x7ff;

template <class V>
inline Floats<V> decode_avg(const NarrowArrays& a, typename V::H base, std::size_t i) {
    const auto code = V::load_bytes(static_cast<const std::uint8_t*>(a.exp_avg) + i);
    const auto size = V::both(code, V::half(kMostAvg));
    const auto bits = V::zero_where_zero(V::template left<4>(V::plus(size, base)), size);
    return widen<V>(V::either(bits, V::template left<8>(V::differ(code, size))));
}

template <class V>
inline Floats<V> decode_sq(const NarrowArrays& a, typename V::H base, std::size_t i) {
    const auto code = V::load_bytes(static_cast<const std::uint8_t*>(a.exp_avg_sq) + i);
    return widen<V>(V::zero_where_zero(V::template left<4>(V::plus(code, base)), code));
}

constexpr std::size_t bytes_of(Moments moments) {
    return moments == Moments::float32 ? 4 : moments == Moments::bfloat16 ? 2 : 1;
}

constexpr std::size_t kFetchAhead = 512;  // elements

/// Asks for an array's elements before they are used, as adam_simd.hpp does and for its reason. The address may be past
/// the array's end: that does nothing.
inline void fetch_ahead(const void* array, std::size_t i, std::size_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(array) + (i + kFetchAhead) * bytes;
    __builtin_prefetch(reinterpret_cast<const void*>(address));
}

/// Adam's arithmetic.
template <class V>
inline void advance(const AdamConstants& c, typename V::F& p, typename V::F& m, typename V::F& v, typename V::F g) {
    g = V::mul(g, V::set(c.grad_scale));
    if (c.l2_decay != 0.0f) g = V::add(g, V::mul(p, V::set(c.l2_decay)));
    p = V::mul(p, V::set(c.shrink));
    m = V::add(c.lerp_from_avg ? m : g, V::mul(V::set(c.lerp_weight), V::sub(g, m)));
    v = V::add(V::mul(v, V::set(c.beta2)), V::mul(V::mul(V::set(c.one_minus_beta2), g), g));
    const auto denominator = V::add(V::mul(V::sqrt(v), V::set(c.one_over_sqrt_correction2)), V::set(c.eps));
    p = V::add(p, V::div(V::mul(V::set(c.neg_step_size), m), denominator));
}

/// Updates 2 * width elements from i on, `at` being the first of the block; codes are left as numbers of steps.
template <class V, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
inline void update(const NarrowArrays& a, const AdamConstants& c, const Bases<V>& bases, Steps& steps, std::size_t at,
                   std::size_t i, typename V::H& top_avg, typename V::H& top_sq) {
    using I = typename V::I;
    fetch_ahead(a.weight, i, weight_dtype == Dtype::float32 ? 4 : 2);
    fetch_ahead(a.grad, i, grad_dtype == Dtype::float32 ? 4 : 2);
    fetch_ahead(a.exp_avg, i, bytes_of(moments));
    fetch_ahead(a.exp_avg_sq, i, bytes_of(moments));
    constexpr Dtype moments_dtype = moments == Moments::float32 ? Dtype::float32 : Dtype::bfloat16;
    const Floats<V> g = load<V, grad_dtype>(a.grad, i);
    Floats<V> p = load<V, weight_dtype>(a.weight, i), m, v;
    if constexpr (moments == Moments::code) {
        m = decode_avg<V>(a, bases.avg, i);
        v = decode_sq<V>(a, bases.sq, i);
    } else {
        m = load<V, moments_dtype>(a.exp_avg, i);
        v = load<V, moments_dtype>(a.exp_avg_sq, i);
    }
    advance<V>(c, p.low, m.low, v.low, g.low);
    advance<V>(c, p.high, m.high, v.high, g.high);

    const I random_low = draw<V>(a, V::low_places(), i), random_high = draw<V>(a, V::high_places(), i);
    const auto to_halves = [](void* array, std::size_t first, I low, I high) {
        V::store_halves(static_cast<std::uint16_t*>(array) + first, V::pack(low, high));
    };
    if constexpr (weight_dtype == Dtype::bfloat16) {
        const auto rounded = [](typename V::F x, I r) { return random_bfloat16<V>(x, V::both(r, V::word(0xffff))); };
        to_halves(a.weight, i, rounded(p.low, random_low), rounded(p.high, random_high));
    } else {
        V::store_floats(static_cast<float*>(a.weight) + i, p);
        if (a.compute_dtype == Dtype::bfloat16)
            to_halves(a.compute, i, nearest_bfloat16<V>(p.low), nearest_bfloat16<V>(p.high));
        if (a.compute_dtype == Dtype::float16) V::store_float16s(static_cast<std::uint16_t*>(a.compute) + i, p);
    }
    if constexpr (moments == Moments::code) {
        const auto avg = [](typename V::F x, I r) {
            return V::template right<20>(V::plus(V::bits(x), V::both(r, V::word(0xfffff))));
        };
        const auto sq = [](typename V::F x, I r) {
            return above_zero<V>(V::template right<20>(V::plus(V::bits(x), V::template right<12>(r))), x);
        };
        const auto q_avg = V::pack(avg(m.low, random_low), avg(m.high, random_high));
        const auto q_sq = V::pack(sq(v.low, random_low), sq(v.high, random_high));
        V::store_halves(steps.avg + (i - at), q_avg);
        V::store_halves(steps.sq + (i - at), q_sq);
        top_avg = V::larger(top_avg, V::both(q_avg, V::half(kSteps)));
        top_sq = V::larger(top_sq, q_sq);
    } else if constexpr (moments == Moments::bfloat16) {
        const auto avg = [](typename V::F x, I r) {
            return random_bfloat16<V>(x, V::both(V::template right<8>(r), V::word(0xffff)));
        };
        const auto sq = [](typename V::F x, I r) {
            return above_zero<V>(random_bfloat16<V>(x, V::template right<16>(r)), x);
        };
        to_halves(a.exp_avg, i, avg(m.low, random_low), avg(m.high, random_high));
        to_halves(a.exp_avg_sq, i, sq(v.low, random_low), sq(v.high, random_high));
    } else {
        V::store_floats(static_cast<float*>(a.exp_avg) + i, m);
        V::store_floats(static_cast<float*>(a.exp_avg_sq) + i, v);
    }
}

template <class V>
inline void encode(const NarrowArrays& a, const Bases<V>& bases, const Steps& steps, std::size_t at, std::size_t i) {
    const auto q = V::load_halves(steps.avg + (i - at));
    const auto size = V::minus_or_zero(V::both(q, V::half(kSteps)), bases.avg);
    const auto sign = V::both(V::template right<4>(q), V::half(128));
    V::store_bytes(static_cast<std::uint8_t*>(a.exp_avg) + i, V::zero_where_zero(V::either(size, sign), size));
    const auto q_sq = V::load_halves(steps.sq + (i - at));
    const auto code = V::larger(V::minus_or_zero(q_sq, bases.sq), V::smaller(q_sq, V::half(1)));
    V::store_bytes(static_cast<std::uint8_t*>(a.exp_avg_sq) + i, code);
}

/// Updates the blocks of elements [begin, end), all of them whole.
template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_blocks(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    static_assert(kCodeBlock % (2 * Vec::width) == 0);
    // Local copies: the compiler knows that no store below changes them.
    const NarrowArrays a = arrays;
    const AdamConstants c = constants;
    Steps steps;
    auto bases = bases_of<Vec>(0, 0);
    for (std::size_t at = begin; at < end; at += kCodeBlock) {
        if constexpr (moments == Moments::code) {
            bases = bases_of<Vec>(a.exponents_avg[at / kCodeBlock], a.exponents_sq[at / kCodeBlock]);
        }
        auto top_avg = Vec::half(0), top_sq = Vec::half(0);
        for (std::size_t i = at; i < at + kCodeBlock; i += 2 * Vec::width)
            update<Vec, moments, weight_dtype, grad_dtype>(a, c, bases, steps, at, i, top_avg, top_sq);
        if constexpr (moments == Moments::code) {
            const std::uint32_t exponent_avg = Vec::largest(top_avg) >> 3, exponent_sq = Vec::largest(top_sq) >> 3;
            a.exponents_avg[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_avg);
            a.exponents_sq[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_sq);
            bases = bases_of<Vec>(exponent_avg, exponent_sq);
            for (std::size_t i = at; i < at + kCodeBlock; i += 2 * Vec::width) encode<Vec>(a, bases, steps, at, i);
        }
    }
}

/// Updates elements [at, end), fewer than a block, in a copy with zeros behind them.
template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_rest(const NarrowArrays& a, const AdamConstants& c, std::size_t at, std::size_t end) {
    alignas(64) unsigned char copies[5][kCodeBlock * sizeof(float)] = {};
    constexpr std::size_t moment_bytes = bytes_of(moments);
    constexpr std::size_t weight_bytes = weight_dtype == Dtype::float32 ? 4 : 2;
    constexpr std::size_t grad_bytes = grad_dtype == Dtype::float32 ? 4 : 2;
    const std::size_t n = end - at;
    const auto start_of = [=](auto* array, std::size_t width) {
        return reinterpret_cast<unsigned char*>(const_cast<void*>(static_cast<const void*>(array))) + at * width;
    };
    NarrowArrays copy = a;
    std::memcpy(copy.weight = copies[0], start_of(a.weight, weight_bytes), n * weight_bytes);
    std::memcpy(copy.exp_avg = copies[1], start_of(a.exp_avg, moment_bytes), n * moment_bytes);
    std::memcpy(copy.exp_avg_sq = copies[2], start_of(a.exp_avg_sq, moment_bytes), n * moment_bytes);
    std::memcpy(copies[3], start_of(a.grad, grad_bytes), n * grad_bytes);
    copy.grad = copies[3];
    copy.compute = copies[4];
    copy.first = a.first + static_cast<std::uint32_t>(at);
    if constexpr (moments == Moments::code) {
        copy.exponents_avg = a.exponents_avg + at / kCodeBlock;
        copy.exponents_sq = a.exponents_sq + at / kCodeBlock;
    }
    update_blocks<Vec, moments, weight_dtype, grad_dtype>(copy, c, 0, kCodeBlock);
    std::memcpy(start_of(a.weight, weight_bytes), copies[0], n * weight_bytes);
    std::memcpy(start_of(a.exp_avg, moment_bytes), copies[1], n * moment_bytes);
    std::memcpy(start_of(a.exp_avg_sq, moment_bytes), copies[2], n * moment_bytes);
    if (a.compute_dtype != Dtype::none) std::memcpy(start_of(a.compute, 2), copies[4], n * 2);
}

template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_all(const NarrowArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    const std::size_t whole = begin + (end - begin) / kCodeBlock * kCodeBlock;
    update_blocks<Vec, moments, weight_dtype, grad_dtype>(a, c, begin, whole);
    if (whole < end) update_rest<Vec, moments, weight_dtype, grad_dtype>(a, c, whole, end);
}

template <class Vec, Moments moments, Dtype weight_dtype>
void by_grad_dtype(const NarrowArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.grad_dtype) {
        case Dtype::bfloat16:
            return update_all<Vec, moments, weight_dtype, Dtype::bfloat16>(a, c, begin, end);
        case Dtype::float16:
            return update_all<Vec, moments, weight_dtype, Dtype::float16>(a, c, begin, end);
        default:
            return update_all<Vec, moments, weight_dtype, Dtype::float32>(a, c, begin, end);
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
