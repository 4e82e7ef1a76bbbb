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
    static I word(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static I count_from(std::uint32_t first) { return plus(word(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
    static I load_words(const std::uint32_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static void store_words(std::uint32_t* to, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
    static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
    static I minus(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I times(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I both(I a, I b) { return _mm256_and_si256(a, b); }
    static I either(I a, I b) { return _mm256_or_si256(a, b); }
    static I differ(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int n>
    static I right(I a) {
        return _mm256_srli_epi32(a, n);
    }
    template <int n>
    static I left(I a) {
        return _mm256_slli_epi32(a, n);
    }
    static I larger(I a, I b) { return _mm256_max_epi32(a, b); }
    static I zero_where_zero(I value, I tested) {
        return _mm256_andnot_si256(_mm256_cmpeq_epi32(tested, _mm256_setzero_si256()), value);
    }
    static I replace_nan(I value, F tested, std::uint32_t by) {
        return _mm256_blendv_epi8(value, word(by), _mm256_castps_si256(_mm256_cmp_ps(tested, tested, _CMP_UNORD_Q)));
    }
    static std::uint32_t largest(I a) {
        alignas(32) std::uint32_t lanes[width];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a);
        std::uint32_t most = lanes[0];
        for (const std::uint32_t lane : lanes) most = Lane::larger(most, lane);
        return most;
    }
    static I bits(F x) { return _mm256_castps_si256(x); }
    static F floats(I x) { return _mm256_castsi256_ps(x); }
    static I load_bytes(const std::uint8_t* from) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static void store_bytes(std::uint8_t* to, I x) {
        const __m128i halves = pack(x);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
    }
    static I load_halves(const std::uint16_t* from) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store_halves(std::uint16_t* to, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), pack(x)); }
    static F widen_float16(const std::uint16_t* from) { return load_float16(from); }
    static void narrow_float16(std::uint16_t* to, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), round_float16(x));
    }

  private:
    static __m128i pack(I x) { return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
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
