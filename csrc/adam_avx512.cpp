// Adam on 16 lanes, for both widths of state. Compiled with AVX-512F; called only if the CPU has it.

#include <immintrin.h>

#include "adam_simd.hpp"
#include "bfloat16_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Avx512 {
    using F = __m512;
    static constexpr std::size_t width = 16;

    static F load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, F x) { _mm512_storeu_ps(to, x); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static F load_bfloat16(const std::uint16_t* from) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static F load_float16(const std::uint16_t* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static __m256i round_bfloat16(F x) { return simd::round_bfloat16(x); }
    static __m256i round_float16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static void stream(std::uint16_t* to, __m256i x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x); }
    static void fence() { _mm_sfence(); }

    using I = __m512i;
    static I bits(F x) { return _mm512_castps_si512(x); }
    static F floats(I x) { return _mm512_castsi512_ps(x); }
    static I word(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static I low_places() { return _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
    static I high_places() { return _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
    static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
    static I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I both(I a, I b) { return _mm512_and_si512(a, b); }
    static I differ(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int n>
    static I right(I a) {
        return _mm512_srli_epi32(a, n);
    }
    static I larger(I a, I b) { return _mm512_max_epu32(a, b); }
    static I smaller(I a, I b) { return _mm512_min_epu32(a, b); }
    static I replace_nan(I value, F tested, std::uint32_t by) {
        return _mm512_mask_mov_epi32(value, _mm512_cmp_ps_mask(tested, tested, _CMP_UNORD_Q), word(by));
    }

    struct H {
        __m512i x;
    };
    static H half(std::uint16_t x) { return {_mm512_set1_epi16(static_cast<short>(x))}; }
    static I low(H a) { return _mm512_unpacklo_epi16(_mm512_setzero_si512(), a.x); }
    static I high(H a) { return _mm512_unpackhi_epi16(_mm512_setzero_si512(), a.x); }
    static H pack(I low, I high) { return {_mm512_packus_epi32(low, high)}; }
    static H plus(H a, H b) { return {_mm512_add_epi16(a.x, b.x)}; }
    static H minus_or_zero(H a, H b) { return {_mm512_subs_epu16(a.x, b.x)}; }
    static H both(H a, H b) { return {_mm512_and_si512(a.x, b.x)}; }
    static H either(H a, H b) { return {_mm512_or_si512(a.x, b.x)}; }
    static H differ(H a, H b) { return {_mm512_xor_si512(a.x, b.x)}; }
    template <int n>
    static H right(H a) {
        return {_mm512_srli_epi16(a.x, n)};
    }
    template <int n>
    static H left(H a) {
        return {_mm512_slli_epi16(a.x, n)};
    }
    static H larger(H a, H b) { return {_mm512_max_epu16(a.x, b.x)}; }
    static H smaller(H a, H b) { return {_mm512_min_epu16(a.x, b.x)}; }
    static H zero_where_zero(H value, H tested) {
        return {_mm512_maskz_mov_epi16(_mm512_test_epi16_mask(tested.x, tested.x), value.x)};
    }
    static std::uint32_t largest(H a) {
        const __m512i in_words = _mm512_max_epu32(_mm512_and_si512(a.x, word(0xffff)), _mm512_srli_epi32(a.x, 16));
        return _mm512_reduce_max_epu32(in_words);
    }

    static Floats<Avx512> load_floats(const float* from) { return pair_of(load(from), load(from + width)); }
    static void store_floats(float* to, Floats<Avx512> x) {
        store(to, first_of(x));
        store(to + width, second_of(x));
    }
    static Floats<Avx512> load_float16s(const std::uint16_t* from) {
        return pair_of(load_float16(from), load_float16(from + width));
    }
    static void store_float16s(std::uint16_t* to, Floats<Avx512> x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_float16(first_of(x)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + width), round_float16(second_of(x)));
    }
    static H load_halves(const std::uint16_t* from) { return {_mm512_loadu_si512(from)}; }
    static void store_halves(std::uint16_t* to, H x) { _mm512_storeu_si512(to, x.x); }
    static H load_bytes(const std::uint8_t* from) {
        return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    }
    static void store_bytes(std::uint8_t* to, H x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(x.x));
    }

  private:
    /// Parts of 128 bits: the even ones of both, and the odd ones.
    static Floats<Avx512> pair_of(F a, F b) {
        return {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)};
    }
    static F first_of(Floats<Avx512> x) {
        return _mm512_permutex2var_ps(x.low, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                                      x.high);
    }
    static F second_of(Floats<Avx512> x) {
        return _mm512_permutex2var_ps(
            x.low, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), x.high);
    }
};

}  // namespace

void adam_avx512(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Avx512>(arrays, constants, begin, end);
}

double norm_avx512(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Avx512>(grad, dtype, begin, end);
}

void narrow_avx512(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Avx512>(arrays, constants, begin, end);
}

}  // namespace elixir
