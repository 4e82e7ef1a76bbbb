// Adam on 8 lanes, for both widths of state. Compiled with AVX2, FMA and F16C; called only if the CPU has them.

#include <immintrin.h>

#include "adam_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Avx2 : Vectors<8> {
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F load_float16(const std::uint16_t* from) { return _mm256_cvtph_ps(load<__m128i>(from)); }
    static HalfH to_float16(F x) { return HalfH(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
    static void stream(std::uint16_t* to, HalfH x) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), __m128i(x)); }
    static void fence() { _mm_sfence(); }

    static I widen(HalfH x) { return I(_mm256_cvtepu16_epi32(__m128i(x))); }
    static H widen(Bytes x) { return H(_mm256_cvtepu8_epi16(__m128i(x))); }
    static HalfH narrow(I x) {
        return HalfH(_mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1)));
    }
    static I low(H a) { return I(_mm256_unpacklo_epi16(__m256i{}, __m256i(a))); }
    static I high(H a) { return I(_mm256_unpackhi_epi16(__m256i{}, __m256i(a))); }
    static H pack(I low, I high) { return H(_mm256_packus_epi32(__m256i(low), __m256i(high))); }
    static H minus_or_zero(H a, H b) { return H(_mm256_subs_epu16(__m256i(a), __m256i(b))); }
    static std::uint32_t largest(H a) {
        const __m128i most = _mm_max_epu16(_mm256_castsi256_si128(__m256i(a)), _mm256_extracti128_si256(__m256i(a), 1));
        return 0xffff - static_cast<std::uint32_t>(
                            _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(-1))))) %
                            0x10000;
    }

    /// The lower and the upper 128 bits of both; undoes itself.
    static Floats to_parts(F a, F b) {
        return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
    }
    static Floats in_order(Floats x) { return to_parts(x.low, x.high); }
};

}  // namespace

void adam_avx2(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Avx2>(arrays, constants, begin, end);
}

void add_avx2(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end) {
    simd::add<Avx2>(total, term, dtype, begin, end);
}

double norm_avx2(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Avx2>(grad, dtype, begin, end);
}

void narrow_avx2(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Avx2>(arrays, constants, begin, end);
}

}  // namespace elixir
