// Adam on 8 lanes, for both widths of state. Compiled with AVX2, FMA and F16C; called only if the CPU has them.

#include <immintrin.h>

#include "adam_simd.hpp"
#include "bfloat16_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Avx2 {
    using F = __m256;
    static constexpr std::size_t width = 8;

    static F load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, F x) { _mm256_storeu_ps(to, x); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

    static F load_bfloat16(const std::uint16_t* from) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static F load_float16(const std::uint16_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static __m128i round_bfloat16(F x) { return simd::round_bfloat16(x); }
    static __m128i round_float16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static void stream(std::uint16_t* to, __m128i x) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), x); }
    static void fence() { _mm_sfence(); }

    using I = __m256i;
    static I bits(F x) { return _mm256_castps_si256(x); }
    static F floats(I x) { return _mm256_castsi256_ps(x); }
    static I word(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static I low_places() { return _mm256_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11); }
    static I high_places() { return _mm256_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15); }
    static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
    static I times(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I both(I a, I b) { return _mm256_and_si256(a, b); }
    static I differ(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int n>
    static I right(I a) {
        return _mm256_srli_epi32(a, n);
    }
    static I larger(I a, I b) { return _mm256_max_epu32(a, b); }
    static I smaller(I a, I b) { return _mm256_min_epu32(a, b); }
    static I replace_nan(I value, F tested, std::uint32_t by) {
        return _mm256_blendv_epi8(value, word(by), _mm256_castps_si256(_mm256_cmp_ps(tested, tested, _CMP_UNORD_Q)));
    }

    struct H {
        __m256i x;
    };
    static H half(std::uint16_t x) { return {_mm256_set1_epi16(static_cast<short>(x))}; }
    static I low(H a) { return _mm256_unpacklo_epi16(_mm256_setzero_si256(), a.x); }
    static I high(H a) { return _mm256_unpackhi_epi16(_mm256_setzero_si256(), a.x); }
    static H pack(I low, I high) { return {_mm256_packus_epi32(low, high)}; }
    static H plus(H a, H b) { return {_mm256_add_epi16(a.x, b.x)}; }
    static H minus_or_zero(H a, H b) { return {_mm256_subs_epu16(a.x, b.x)}; }
    static H both(H a, H b) { return {_mm256_and_si256(a.x, b.x)}; }
    static H either(H a, H b) { return {_mm256_or_si256(a.x, b.x)}; }
    static H differ(H a, H b) { return {_mm256_xor_si256(a.x, b.x)}; }
    template <int n>
    static H right(H a) {
        return {_mm256_srli_epi16(a.x, n)};
    }
    template <int n>
    static H left(H a) {
        return {_mm256_slli_epi16(a.x, n)};
    }
    static H larger(H a, H b) { return {_mm256_max_epu16(a.x, b.x)}; }
    static H smaller(H a, H b) { return {_mm256_min_epu16(a.x, b.x)}; }
    static H zero_where_zero(H value, H tested) {
        return {_mm256_andnot_si256(_mm256_cmpeq_epi16(tested.x, _mm256_setzero_si256()), value.x)};
    }
    static std::uint32_t largest(H a) {
        const __m128i most = _mm_max_epu16(_mm256_castsi256_si128(a.x), _mm256_extracti128_si256(a.x, 1));
        return 0xffff - static_cast<std::uint32_t>(
                            _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(-1))))) %
                            0x10000;
    }

    static Floats<Avx2> load_floats(const float* from) { return halves_of(load(from), load(from + width)); }
    static void store_floats(float* to, Floats<Avx2> x) {
        const Floats<Avx2> in_order = halves_of(x.low, x.high);
        store(to, in_order.low);
        store(to + width, in_order.high);
    }
    static Floats<Avx2> load_float16s(const std::uint16_t* from) {
        return halves_of(load_float16(from), load_float16(from + width));
    }
    static void store_float16s(std::uint16_t* to, Floats<Avx2> x) {
        const Floats<Avx2> in_order = halves_of(x.low, x.high);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), round_float16(in_order.low));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + width), round_float16(in_order.high));
    }
    static H load_halves(const std::uint16_t* from) {
        return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
    }
    static void store_halves(std::uint16_t* to, H x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.x); }
    static H load_bytes(const std::uint8_t* from) {
        return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
    }
    static void store_bytes(std::uint8_t* to, H x) {
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(x.x), _mm256_extracti128_si256(x.x, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    }

  private:
    /// The lower and the upper 128 bits of both; undoes itself.
    static Floats<Avx2> halves_of(F a, F b) {
        return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
    }
};

}  // namespace

void adam_avx2(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Avx2>(arrays, constants, begin, end);
}

double norm_avx2(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Avx2>(grad, dtype, begin, end);
}

void narrow_avx2(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Avx2>(arrays, constants, begin, end);
}

}  // namespace elixir
