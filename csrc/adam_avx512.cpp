// Adam on 16 lanes, for both widths of state. Compiled with AVX-512F; called only if the CPU has it.

#include <immintrin.h>

#include "adam_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Avx512 : Vectors<16> {
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F load_float16(const std::uint16_t* from) { return _mm512_cvtph_ps(load<__m256i>(from)); }
    static HalfH to_float16(F x) { return HalfH(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
    static void stream(std::uint16_t* to, HalfH x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), __m256i(x)); }
    static void fence() { _mm_sfence(); }

    static I widen(HalfH x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
    static H widen(Bytes x) { return H(_mm512_cvtepu8_epi16(__m256i(x))); }
    static HalfH narrow(I x) { return HalfH(_mm512_cvtepi32_epi16(__m512i(x))); }
    static I low(H a) { return I(_mm512_unpacklo_epi16(__m512i{}, __m512i(a))); }
    static I high(H a) { return I(_mm512_unpackhi_epi16(__m512i{}, __m512i(a))); }
    static H pack(I low, I high) { return H(_mm512_packus_epi32(__m512i(low), __m512i(high))); }
    static H minus_or_zero(H a, H b) { return H(_mm512_subs_epu16(__m512i(a), __m512i(b))); }
    static std::uint32_t largest(H a) {
        const I words = I(a);
        return _mm512_reduce_max_epu32(__m512i(larger<I>(words & 0xffff, words >> 16)));
    }

    /// Parts of 128 bits: the even ones of both, and the odd ones.
    static Floats to_parts(F a, F b) { return {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)}; }
    static Floats in_order(Floats x) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        return {_mm512_permutex2var_ps(x.low, first, x.high), _mm512_permutex2var_ps(x.low, second, x.high)};
    }
};

}  // namespace

void adam_avx512(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Avx512>(arrays, constants, begin, end);
}

void add_avx512(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end) {
    simd::add<Avx512>(total, term, dtype, begin, end);
}

double norm_avx512(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Avx512>(grad, dtype, begin, end);
}

void narrow_avx512(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Avx512>(arrays, constants, begin, end);
}

}  // namespace elixir
