// The decoders over vectors, written once. decode_avx2.cpp and decode_avx512.cpp define the vector and instantiate
// them.
//
// `Vec` is an internal-linkage type of the including file, so each gets its own copy of these templates. It is one of
// `Vectors` with narrow (words to halves), codes and from_int8 of `width` bytes, and for 16 floats `Table` with times
// and store_values, and `Rounded`.
//
// A block of four-bit codes has 16 possible values. They are multiplied by the scale and rounded first: a code is then
// looked up among 16 results, by shuffles that look up 32 at a time.
//
// An output that is larger than a core's cache is written past it: its lines need not be read before they are written.
#pragma once

#include <immintrin.h>

#include "decode_kernel.hpp"
#include "vectors.hpp"

namespace elixir::simd {

constexpr std::size_t kStep = 32;  // four-bit codes in a round: 16 bytes
constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kStreamNumel = std::size_t{1} << 21;  // 4 MiB of bfloat16

/// 32 codes in the order of their elements, a byte each.
template <class Vec, bool high_first>
inline __m256i codes_of(const std::uint8_t* from) {
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i spread = high_first ? _mm256_or_si256(_mm256_srli_epi16(pairs, 4), _mm256_slli_epi16(pairs, 8))
                                      : _mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4));
    return _mm256_and_si256(spread, _mm256_set1_epi8(0xf));
}

template <class Vec, bool high_first, Dtype dtype, bool streamed>
std::size_t steps(const Nibbles& packed, void* out, std::size_t begin, std::size_t end) {
    const Nibbles p = packed;  // a copy: the compiler knows that no store below changes it
    std::size_t i = begin;
    for (std::size_t block = begin / p.block; i + kStep <= end; ++block) {
        const std::size_t stop = end - i < p.block ? end : i + p.block;
        const typename Vec::Table results = Vec::times(p.values, scale_of(p, block));
        if constexpr (dtype == Dtype::float32) {
            for (; i + kStep <= stop; i += kStep)
                Vec::store_values(static_cast<float*>(out) + i, results, codes_of<Vec, high_first>(p.codes + i / 2));
        } else {
            const typename Vec::Rounded rounded(results);
            for (; i + kStep <= stop; i += kStep)
                rounded.template store<high_first, streamed>(static_cast<std::uint16_t*>(out) + i, p.codes + i / 2);
        }
    }
    return i;
}

template <class Vec, bool high_first>
std::size_t by_output(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end) {
    if (dtype == Dtype::float32) return steps<Vec, high_first, Dtype::float32, false>(packed, out, begin, end);
    const auto address = reinterpret_cast<std::uintptr_t>(out) + 2 * begin;
    if (end - begin < kStreamNumel || address % kLineBytes != 0)
        return steps<Vec, high_first, Dtype::bfloat16, false>(packed, out, begin, end);
    const std::size_t rest = steps<Vec, high_first, Dtype::bfloat16, true>(packed, out, begin, end);
    _mm_sfence();  // orders the streamed stores before any signal to another thread that they are done
    return rest;
}

/// The whole decoder of four bits: vectors, and the scalar one at the end. `begin` is a multiple of the block.
template <class Vec>
void nibbles(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end) {
    const std::size_t rest = packed.high_first ? by_output<Vec, true>(packed, out, dtype, begin, end)
                                               : by_output<Vec, false>(packed, out, dtype, begin, end);
    nibbles_scalar(packed, out, dtype, rest, end);
}

template <class Vec>
inline typename Vec::F from_e4m3fn(typename Vec::I code) {
    using F = typename Vec::F;
    using I = typename Vec::I;
    const I magnitude = code & 0x7f;
    const I shifted = magnitude << 20;
    const F normal = std::bit_cast<F>(shifted + (120u << 23));
    // Below 2^-6: its mantissa on top of 2^-6, which is then taken away. No operand of any instruction is subnormal.
    const F small = std::bit_cast<F>(shifted + (121u << 23)) - 0x1p-6f;
    const I value = std::bit_cast<I>(magnitude < 8 ? small : normal) | (code ^ magnitude) << 24;
    return std::bit_cast<F>(magnitude == 0x7f ? I{} + kNan : value);
}

template <class Vec, class To>
inline void store_as(To* to, typename Vec::F x) {
    if constexpr (sizeof(To) == sizeof(float)) {
        store(to, x);
    } else {
        store(to, to_bfloat16<Vec>(x));
    }
}

template <class Vec, Octets::Code code, class To>
std::size_t run(const std::uint8_t* codes, float scale, To* out, std::size_t numel) {
    std::size_t i = 0;
    for (; i + Vec::width <= numel; i += Vec::width) {
        const auto value =
            code == Octets::Code::e4m3fn ? from_e4m3fn<Vec>(Vec::codes(codes + i)) : Vec::from_int8(codes + i);
        store_as<Vec>(out + i, value * scale);
    }
    return i;
}

template <class Vec, class To>
void octets_to(const std::uint8_t* codes, Octets::Code code, float scale, To* out, Dtype dtype, std::size_t numel) {
    const std::size_t done = code == Octets::Code::e4m3fn ? run<Vec, Octets::Code::e4m3fn>(codes, scale, out, numel)
                                                          : run<Vec, Octets::Code::int8>(codes, scale, out, numel);
    octets_scalar(codes + done, code, scale, out + done, dtype, numel - done);
}

/// The whole decoder of eight bits.
template <class Vec>
void octets(const std::uint8_t* codes, Octets::Code code, float scale, void* out, Dtype dtype, std::size_t numel) {
    if (dtype == Dtype::float32) {
        octets_to<Vec>(codes, code, scale, static_cast<float*>(out), dtype, numel);
    } else {
        octets_to<Vec>(codes, code, scale, static_cast<std::uint16_t*>(out), dtype, numel);
    }
}

}  // namespace elixir::simd
