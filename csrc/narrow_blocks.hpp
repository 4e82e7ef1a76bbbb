// The kernel for narrow state, written once over vectors. adam_scalar.cpp instantiates it with one lane, which is the
// reference; adam_avx2.cpp, adam_avx512.cpp and adam_neon.cpp with theirs.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It is one of
// `Vectors` with sqrt, load_float16, to_float16, widen (bytes to halves), low, high, pack, minus_or_zero (a - b, or 0
// where that is below) and the largest of the halves. Everything here is in an unnamed namespace for the same reason.
//
// With 10 bytes per element (bf16 weight and gradient, codes) instead of 28, the kernel is bound by arithmetic and no
// longer by memory. So values of 16 bits or fewer are processed in registers of halves, twice as many per instruction.
// A bf16 number is widened by appending zeros, and codes are bf16 numbers. Widening and packing stay within parts of
// 128 bits, where they take one instruction each: `low` and `high` are the first and the second four halves of each
// such part, and `pack` undoes it. Only values with 32 bits in memory are put into this order (`load`) and back
// (`store`).
//
// Codes take two passes over a block of 256 elements, since its largest element is known only after the first, whose
// results stay in the nearest cache. Blocks are always whole: the last one of a shard is padded with zeros, which do
// not change its codes.
#pragma once

#include <limits>

#include "narrow_kernel.hpp"
#include "vectors.hpp"

namespace elixir {
namespace {

/// The random words of elements with these indices.
template <class Words>
inline Words word_of(const NarrowArrays& a, Words index) {
    Words x = index ^ a.key[0];
    x = (x ^ x >> 16) * 0x7feb352du;
    x = x ^ a.key[1];
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/// The random words of elements from i on, in the order of `Vec::low`, then in that of `Vec::high`.
template <class V>
inline typename V::I draw(const NarrowArrays& a, bool high, std::size_t i) {
    constexpr std::size_t part = V::width < 4 ? V::width : 4;
    typename V::I x;
    for (std::size_t lane = 0; lane < V::width; ++lane) x[lane] = lane + (lane / part + high) * part;
    return word_of<typename V::I>(a, x + (a.first + static_cast<std::uint32_t>(i)));
}

/// The upper half of a float after random bits were added to the lower one. A NaN stays a NaN: gradients have that of
/// `one_nan`, and the lower half of a NaN computed from bf16 is 0.
template <class V>
inline typename V::I random_bfloat16(typename V::F x, typename V::I random) {
    return (std::bit_cast<typename V::I>(x) + random) >> 16;
}

/// Compilers know this form for one instruction.
template <class Register>
inline Register at_most_one(Register x) {
    return x > 1 ? Register{} + 1 : x;
}

/// A second moment above zero is not rounded to zero: `rounded`, or 1 if that is 0 and x is not.
template <class V>
inline typename V::I above_zero(typename V::I rounded, typename V::F x) {
    using I = typename V::I;
    return larger(rounded, at_most_one(std::bit_cast<I>(x)));
}

template <class V>
inline typename V::Floats widen(typename V::H bfloat16) {
    return {std::bit_cast<typename V::F>(V::low(bfloat16)), std::bit_cast<typename V::F>(V::high(bfloat16))};
}

template <class V, Dtype dtype>
inline typename V::Floats load(const void* from, std::size_t i) {
    using F = typename V::F;
    const auto* floats = static_cast<const float*>(from) + i;
    if constexpr (dtype == Dtype::float32) return V::to_parts(load<F>(floats), load<F>(floats + V::width));
    const auto* halves = static_cast<const std::uint16_t*>(from) + i;
    if constexpr (dtype == Dtype::bfloat16) return widen<V>(load<typename V::H>(halves));
    if constexpr (dtype == Dtype::float16)
        return V::to_parts(V::load_float16(halves), V::load_float16(halves + V::width));
}

template <class V>
inline void store_floats(void* to, std::size_t i, typename V::Floats x) {
    const auto [first, second] = V::in_order(x);
    store(static_cast<float*>(to) + i, first);
    store(static_cast<float*>(to) + i + V::width, second);
}

template <class V>
inline void store_float16s(void* to, std::size_t i, typename V::Floats x) {
    const auto [first, second] = V::in_order(x);
    store(static_cast<std::uint16_t*>(to) + i, V::to_float16(first));
    store(static_cast<std::uint16_t*>(to) + i + V::width, V::to_float16(second));
}

template <class V>
inline typename V::H load_bytes(const void* from, std::size_t i) {
    return V::widen(load<typename V::Bytes>(static_cast<const std::uint8_t*>(from) + i));
}

template <class V>
inline void store_bytes(void* to, std::size_t i, typename V::H x) {
    store(static_cast<std::uint8_t*>(to) + i, __builtin_convertvector(x, typename V::Bytes));
}

/// `value`, but zero where `tested` is.
template <class H>
inline H zero_where_zero(H value, H tested) {
    return tested == 0 ? H{} : value;
}

/// The constants of a moment's coding (narrow.hpp).
struct Coding {
    std::uint32_t shift;  // bits of a float below its step
    std::uint32_t half;   // the first fine code
    std::uint32_t least;  // exponents below it count as it: no step is negative, and no second moment underflows
    std::uint32_t first;  // no code is below this one's step, in coarse steps
};
constexpr Coding kAvg{.shift = 20, .half = 64, .least = 39, .first = 0};
constexpr Coding kSq{.shift = 18, .half = 128, .least = 99, .first = 96 << 3};
constexpr std::uint16_t kSize = 127;  // of the code of exp_avg; the sign is above

inline std::uint32_t exponent_of(const Coding& coding, std::uint32_t step) {
    return larger(step >> (23 - coding.shift), coding.least);
}

/// The bases of a block's codes: in fine steps, and in coarse ones of four.
template <class V>
struct Base {
    typename V::H fine, coarse, first;
};

template <class V>
inline Base<V> base_of(const Coding& coding, std::uint32_t exponent) {
    using H = typename V::H;
    const std::uint32_t fine = ((exponent + 1) << (23 - coding.shift)) - coding.half;
    const std::uint32_t coarse = fine / 4 - coding.half;
    const std::uint32_t first = coding.first > coarse + 1 ? coding.first - coarse : 1;
    const auto all = [](std::uint32_t x) { return H{} + static_cast<std::uint16_t>(x); };
    return {all(fine - coding.half), all(coarse), all(first)};
}

template <class V>
struct Bases {
    Base<V> avg, sq;
};

/// The code of a step q. The larger of both is that of its range: from `fine` on fine steps count more.
template <class V>
inline typename V::H code_of(const Base<V>& base, typename V::H q, typename V::H random) {
    return larger<typename V::H>(V::minus_or_zero((q + random) >> 2, base.coarse), V::minus_or_zero(q, base.fine));
}

/// The step of a code; 0 of 0.
template <class V>
inline typename V::H step_of(const Base<V>& base, typename V::H code) {
    return zero_where_zero(smaller<typename V::H>(code + base.fine, (code + base.coarse) << 2), code);
}

/// The two random bits of each coarse step of a block: those of its first word, incremented for each element.
template <class V>
struct Turns {
    typename V::H avg, sq;
};

template <class V>
inline Turns<V> turns_of(std::uint32_t word) {
    typename V::H lanes;
    for (std::size_t lane = 0; lane < 2 * V::width; ++lane) lanes[lane] = static_cast<std::uint16_t>(lane);
    const auto from = [&](std::uint32_t bits) ->
        typename V::H { return (lanes + static_cast<std::uint16_t>(bits & 3)) & 3; };
    return {from(word >> 20), from(word)};
}

/// The turns of the element at `i` and the following ones; the first ones again if a register has whole rounds.
template <class V>
inline typename V::H turn_at(typename V::H turns, std::size_t i) {
    return V::width > 1 ? turns : (turns + static_cast<std::uint16_t>(i)) & 3;
}

/// The new steps of a block; those of exp_avg have the sign in bit 11.
struct Steps {
    alignas(64) std::uint16_t avg[kCodeBlock];
    alignas(64) std::uint16_t sq[kCodeBlock];
};
constexpr std::uint16_t kSteps = 0x7ff;

template <class V>
inline typename V::Floats decode_avg(const NarrowArrays& a, const Base<V>& base, std::size_t i) {
    const auto code = load_bytes<V>(a.exp_avg, i);
    const auto size = code & kSize;
    return widen<V>(step_of<V>(base, size) << (kAvg.shift - 16) | (code ^ size) << 8);
}

template <class V>
inline typename V::Floats decode_sq(const NarrowArrays& a, const Base<V>& base, std::size_t i) {
    const auto code = load_bytes<V>(a.exp_avg_sq, i);
    const auto u = widen<V>(step_of<V>(base, code) << (kSq.shift - 16));
    const auto low = u.low * u.low, high = u.high * u.high;
    return {low * low, high * high};
}

constexpr std::size_t bytes_of(Moments moments) {
    return moments == Moments::float32 ? 4 : moments == Moments::bfloat16 ? 2 : 1;
}

constexpr std::size_t kFetchAhead = 512;  // elements

/// Prefetches an array's elements, for the reason in adam_simd.hpp. An address past the array's end has no effect.
inline void fetch_ahead(const void* array, std::size_t i, std::size_t bytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(array) + (i + kFetchAhead) * bytes;
    __builtin_prefetch(reinterpret_cast<const void*>(address));
}

/// `x` with all NaNs replaced by the same one: adding random bits to another one could overflow to zero.
template <class V>
inline typename V::F one_nan(typename V::F x) {
    return x == x ? x : typename V::F{} + std::numeric_limits<float>::quiet_NaN();
}

/// Adam's arithmetic; returns sqrt(v).
template <class V>
inline typename V::F advance(const AdamConstants& c, typename V::F& p, typename V::F& m, typename V::F& v,
                             typename V::F g) {
    g = g * c.grad_scale;
    if (c.l2_decay != 0.0f) g = g + p * c.l2_decay;
    g = one_nan<V>(g);
    p = p * c.shrink;
    m = (c.lerp_from_avg ? m : g) + c.lerp_weight * (g - m);
    v = v * c.beta2 + (c.one_minus_beta2 * g) * g;
    const auto root = V::sqrt(v);
    const auto denominator = root * c.one_over_sqrt_correction2 + c.eps;
    p = p + (c.neg_step_size * m) / denominator;
    return root;
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
    const auto g = load<V, grad_dtype>(a.grad, i);
    typename V::Floats p = load<V, weight_dtype>(a.weight, i), m, v;
    if constexpr (moments == Moments::code) {
        m = decode_avg<V>(a, bases.avg, i);
        v = decode_sq<V>(a, bases.sq, i);
    } else {
        m = load<V, moments_dtype>(a.exp_avg, i);
        v = load<V, moments_dtype>(a.exp_avg_sq, i);
    }
    const auto root_low = advance<V>(c, p.low, m.low, v.low, g.low);
    const auto root_high = advance<V>(c, p.high, m.high, v.high, g.high);

    const I random_low = draw<V>(a, false, i), random_high = draw<V>(a, true, i);
    const auto to_halves = [](void* array, std::size_t first, I low, I high) {
        store(static_cast<std::uint16_t*>(array) + first, V::pack(low, high));
    };
    if constexpr (weight_dtype == Dtype::bfloat16) {
        const auto rounded = [](typename V::F x, I r) { return random_bfloat16<V>(x, r & 0xffff); };
        to_halves(a.weight, i, rounded(p.low, random_low), rounded(p.high, random_high));
    } else {
        store_floats<V>(a.weight, i, p);
        if (a.compute_dtype == Dtype::bfloat16)
            to_halves(a.compute, i, nearest_bfloat16<V>(p.low), nearest_bfloat16<V>(p.high));
        if (a.compute_dtype == Dtype::float16) store_float16s<V>(a.compute, i, p);
    }
    if constexpr (moments == Moments::code) {
        const auto avg = [](typename V::F x, I r) { return (std::bit_cast<I>(x) + (r & 0xfffff)) >> kAvg.shift; };
        const auto sq = [](typename V::F root, I r) {
            return (std::bit_cast<I>(V::sqrt(root)) + (r >> 14)) >> kSq.shift;
        };
        const auto q_avg = V::pack(avg(m.low, random_low), avg(m.high, random_high));
        const auto q_sq = V::pack(sq(root_low, random_low), sq(root_high, random_high));
        store(steps.avg + (i - at), q_avg);
        store(steps.sq + (i - at), q_sq);
        top_avg = larger<typename V::H>(top_avg, q_avg & kSteps);
        top_sq = larger<typename V::H>(top_sq, q_sq);
    } else if constexpr (moments == Moments::bfloat16) {
        const auto avg = [](typename V::F x, I r) { return random_bfloat16<V>(x, r >> 8 & 0xffff); };
        const auto sq = [](typename V::F x, I r) { return above_zero<V>(random_bfloat16<V>(x, r >> 16), x); };
        to_halves(a.exp_avg, i, avg(m.low, random_low), avg(m.high, random_high));
        to_halves(a.exp_avg_sq, i, sq(v.low, random_low), sq(v.high, random_high));
    } else {
        store_floats<V>(a.exp_avg, i, m);
        store_floats<V>(a.exp_avg_sq, i, v);
    }
}

template <class V>
inline void encode(const NarrowArrays& a, const Bases<V>& bases, const Turns<V>& turns, const Steps& steps,
                   std::size_t at, std::size_t i) {
    using H = typename V::H;
    const H avg = load<H>(steps.avg + (i - at));
    const H size = code_of<V>(bases.avg, avg & kSteps, turn_at<V>(turns.avg, i - at));
    store_bytes<V>(a.exp_avg, i, zero_where_zero<H>(size | (avg >> 4 & 128), size));
    const H sq = load<H>(steps.sq + (i - at));
    const H code = larger<H>(code_of<V>(bases.sq, sq, turn_at<V>(turns.sq, i - at)), bases.sq.first);
    store_bytes<V>(a.exp_avg_sq, i, zero_where_zero<H>(code, sq));
}

/// Updates the blocks of elements [begin, end), all of them whole.
template <class Vec, Moments moments, Dtype weight_dtype, Dtype grad_dtype>
void update_blocks(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    static_assert(kCodeBlock % (2 * Vec::width) == 0);
    // Local copies: the compiler knows that no store below changes them.
    const NarrowArrays a = arrays;
    const AdamConstants c = constants;
    Steps steps;
    Bases<Vec> bases{};
    for (std::size_t at = begin; at < end; at += kCodeBlock) {
        if constexpr (moments == Moments::code) {
            bases.avg = base_of<Vec>(kAvg, a.exponents_avg[at / kCodeBlock]);
            bases.sq = base_of<Vec>(kSq, a.exponents_sq[at / kCodeBlock]);
        }
        typename Vec::H top_avg{}, top_sq{};
        for (std::size_t i = at; i < at + kCodeBlock; i += 2 * Vec::width)
            update<Vec, moments, weight_dtype, grad_dtype>(a, c, bases, steps, at, i, top_avg, top_sq);
        if constexpr (moments == Moments::code) {
            const std::uint32_t exponent_avg = exponent_of(kAvg, Vec::largest(top_avg));
            const std::uint32_t exponent_sq = exponent_of(kSq, Vec::largest(top_sq));
            a.exponents_avg[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_avg);
            a.exponents_sq[at / kCodeBlock] = static_cast<std::uint8_t>(exponent_sq);
            bases = {base_of<Vec>(kAvg, exponent_avg), base_of<Vec>(kSq, exponent_sq)};
            const auto turns = turns_of<Vec>(word_of(a, a.first + static_cast<std::uint32_t>(at)));
            for (std::size_t i = at; i < at + kCodeBlock; i += 2 * Vec::width)
                encode<Vec>(a, bases, turns, steps, at, i);
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
