// The Adam kernel over vectors, written once. adam_avx2.cpp, adam_avx512.cpp and adam_neon.cpp define the vector and
// instantiate the kernel.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It is one of
// `Vectors` with sqrt, fma, widen (halves to words), narrow, load_float16, to_float16, and stream (16-bit values, past
// the cache) with its fence.
//
// The step is memory-bound: 28 bytes an element with a 16-bit gradient and a 16-bit weight. Two measures make it as
// fast as a plain read-modify-write of as many bytes (measured on arrays of 450 MB, 1 thread, AVX-512; with neither:
// 1.16 times as long): prefetches 1 KB ahead in each array, since five streams outrun the hardware's prefetcher at the
// end of every page (13 %), and stores of the compute weight that do not read its cache lines first (4 %).
#pragma once

#include "adam_kernel.hpp"
#include "vectors.hpp"

namespace elixir::simd {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kBlock = 16;           // elements in a round: a cache line of floats
constexpr std::size_t kPrefetchAhead = 256;  // elements; anything from 128 to 384 measured the same

template <class Vec, Dtype dtype>
inline typename Vec::F load_grad(const void* grad, std::size_t i) {
    if constexpr (dtype == Dtype::float32) return load<typename Vec::F>(static_cast<const float*>(grad) + i);
    const auto* halves = static_cast<const std::uint16_t*>(grad) + i;
    if constexpr (dtype == Dtype::bfloat16) return from_bfloat16<Vec>(load<typename Vec::HalfH>(halves));
    if constexpr (dtype == Dtype::float16) return Vec::load_float16(halves);
}

template <class Vec, Dtype dtype>
inline void stream_compute(void* compute, std::size_t i, typename Vec::F value) {
    [[maybe_unused]] std::uint16_t* const to = static_cast<std::uint16_t*>(compute) + i;
    if constexpr (dtype == Dtype::bfloat16) Vec::stream(to, to_bfloat16<Vec>(value));
    if constexpr (dtype == Dtype::float16) Vec::stream(to, Vec::to_float16(value));
}

// The address may be past the array's end: such a prefetch does nothing.
template <class Vec>
inline void prefetch(const void* array, std::size_t i, std::size_t element_bytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(array) + i * element_bytes));
}

template <class Vec, Dtype grad_dtype, Dtype compute_dtype>
inline void update(const AdamArrays& a, const AdamConstants& c, std::size_t i) {
    using F = typename Vec::F;
    F p = load<F>(a.master + i);
    F m = load<F>(a.exp_avg + i);
    F v = load<F>(a.exp_avg_sq + i);
    F g = load_grad<Vec, grad_dtype>(a.grad, i) * c.grad_scale;
    if (c.l2_decay != 0.0f) g = Vec::fma(p, set<F>(c.l2_decay), g);
    p = p * c.shrink;
    m = Vec::fma(set<F>(c.lerp_weight), g - m, c.lerp_from_avg ? m : g);
    v = Vec::fma(c.one_minus_beta2 * g, g, v * c.beta2);
    const F denominator = Vec::sqrt(v) / c.sqrt_correction2 + c.eps;
    p = p + (c.neg_step_size * m) / denominator;
    store(a.master + i, p);
    store(a.exp_avg + i, m);
    store(a.exp_avg_sq + i, v);
    stream_compute<Vec, compute_dtype>(a.compute, i, p);
}

/// Updates the whole blocks of [begin, end) and returns where the rest begins.
template <class Vec, Dtype grad_dtype, Dtype compute_dtype>
std::size_t blocks(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    static_assert(kBlock % Vec::width == 0);
    // Local copies: the compiler knows that no store below changes them.
    const AdamArrays a = arrays;
    const AdamConstants c = constants;
    std::size_t i = begin;
    for (; i + kBlock <= end; i += kBlock) {
        const std::size_t ahead = i + kPrefetchAhead;
        prefetch<Vec>(a.master, ahead, 4);
        prefetch<Vec>(a.exp_avg, ahead, 4);
        prefetch<Vec>(a.exp_avg_sq, ahead, 4);
        prefetch<Vec>(a.grad, ahead, grad_dtype == Dtype::float32 ? 4 : 2);
        for (std::size_t j = i; j < i + kBlock; j += Vec::width) update<Vec, grad_dtype, compute_dtype>(a, c, j);
    }
    return i;
}

template <class Vec, Dtype grad_dtype>
std::size_t by_compute(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.compute_dtype) {
        case Dtype::bfloat16:
            return blocks<Vec, grad_dtype, Dtype::bfloat16>(a, c, begin, end);
        case Dtype::float16:
            return blocks<Vec, grad_dtype, Dtype::float16>(a, c, begin, end);
        default:
            return blocks<Vec, grad_dtype, Dtype::none>(a, c, begin, end);
    }
}

template <class Vec>
std::size_t by_grad(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    switch (a.grad_dtype) {
        case Dtype::bfloat16:
            return by_compute<Vec, Dtype::bfloat16>(a, c, begin, end);
        case Dtype::float16:
            return by_compute<Vec, Dtype::float16>(a, c, begin, end);
        default:
            return by_compute<Vec, Dtype::float32>(a, c, begin, end);
    }
}

// Number of elements before `compute` is aligned to a cache line, as streamed stores need.
template <class Vec>
std::size_t head_numel(const AdamArrays& a, std::size_t begin, std::size_t end) {
    if (a.compute_dtype == Dtype::none) return 0;
    const auto address = reinterpret_cast<std::uintptr_t>(a.compute) + 2 * begin;
    const std::size_t head = (kLineBytes - address % kLineBytes) % kLineBytes / 2;
    return head < end - begin ? head : end - begin;
}

/// The whole kernel: scalar at both ends, blocks of vectors between.
template <class Vec>
void adam(const AdamArrays& a, const AdamConstants& c, std::size_t begin, std::size_t end) {
    const std::size_t first = begin + head_numel<Vec>(a, begin, end);
    adam_scalar(a, c, begin, first);
    const std::size_t rest = by_grad<Vec>(a, c, first, end);
    Vec::fence();  // orders the streamed stores before any signal to another thread that they are done
    adam_scalar(a, c, rest, end);
}

template <class Vec, Dtype dtype>
void add_of(float* total, const void* term, std::size_t begin, std::size_t end) {
    std::size_t i = begin;
    for (; i + kBlock <= end; i += kBlock) {
        prefetch<Vec>(total, i + kPrefetchAhead, 4);
        prefetch<Vec>(term, i + kPrefetchAhead, dtype == Dtype::float32 ? 4 : 2);
        for (std::size_t j = i; j < i + kBlock; j += Vec::width) {
            store(total + j, load<typename Vec::F>(total + j) + load_grad<Vec, dtype>(term, j));
        }
    }
    add_scalar(total, term, dtype, i, end);
}

template <class Vec>
void add(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end) {
    switch (dtype) {
        case Dtype::bfloat16:
            return add_of<Vec, Dtype::bfloat16>(total, term, begin, end);
        case Dtype::float16:
            return add_of<Vec, Dtype::float16>(total, term, begin, end);
        default:
            return add_of<Vec, Dtype::float32>(total, term, begin, end);
    }
}

template <class Vec, Dtype dtype>
double norm_of(const void* grad, std::size_t begin, std::size_t end) {
    constexpr std::size_t registers = kNormLanes / Vec::width;
    double total = 0.0;
    for (std::size_t row = begin; row < end; row += kNormRow) {
        typename Vec::F sums[registers] = {};
        const std::size_t stop = row + kNormRow < end ? row + kNormRow : end;
        std::size_t i = row;
        for (; i + kNormLanes <= stop; i += kNormLanes) {
            for (std::size_t r = 0; r < registers; ++r) {
                const auto x = load_grad<Vec, dtype>(grad, i + r * Vec::width);
                sums[r] = Vec::fma(x, x, sums[r]);
            }
        }
        float lanes[kNormLanes];
        for (std::size_t r = 0; r < registers; ++r) store(lanes + r * Vec::width, sums[r]);
        if (i < stop) {  // fewer than a round: as if zeros followed
            alignas(kLineBytes) unsigned char padded[kNormLanes * sizeof(float)] = {};
            constexpr std::size_t element = dtype == Dtype::float32 ? 4 : 2;
            std::memcpy(padded, static_cast<const unsigned char*>(grad) + i * element, (stop - i) * element);
            for (std::size_t r = 0; r < registers; ++r) {
                const auto x = load_grad<Vec, dtype>(padded, r * Vec::width);
                store(lanes + r * Vec::width, Vec::fma(x, x, sums[r]));
            }
        }
        for (const float sum : lanes) total += sum;
    }
    return total;
}

template <class Vec>
double norm(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    switch (dtype) {
        case Dtype::bfloat16:
            return norm_of<Vec, Dtype::bfloat16>(grad, begin, end);
        case Dtype::float16:
            return norm_of<Vec, Dtype::float16>(grad, begin, end);
        default:
            return norm_of<Vec, Dtype::float32>(grad, begin, end);
    }
}

}  // namespace elixir::simd
