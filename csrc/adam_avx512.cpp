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
    static I word(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static I count_from(std::uint32_t first) {
        return plus(word(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    static I load_words(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
    static void store_words(std::uint32_t* to, I x) { _mm512_storeu_si512(to, x); }
    static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
    static I minus(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I both(I a, I b) { return _mm512_and_si512(a, b); }
    static I either(I a, I b) { return _mm512_or_si512(a, b); }
    static I differ(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int n>
    static I right(I a) {
        return _mm512_srli_epi32(a, n);
    }
    template <int n>
    static I left(I a) {
        return _mm512_slli_epi32(a, n);
    }
    static I larger(I a, I b) { return _mm512_max_epi32(a, b); }
    static I zero_where_zero(I value, I tested) {
        return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(tested, tested), value);
    }
    static I replace_nan(I value, F tested, std::uint32_t by) {
        return _mm512_mask_mov_epi32(value, _mm512_cmp_ps_mask(tested, tested, _CMP_UNORD_Q), word(by));
    }
    static std::uint32_t largest(I a) {
        alignas(64) std::uint32_t lanes[width];
        _mm512_store_si512(lanes, a);
        std::uint32_t most = lanes[0];
        for (const std::uint32_t lane : lanes) most = Lane::larger(most, lane);
        return most;
    }
    static I bits(F x) { return _mm512_castps_si512(x); }
    static F floats(I x) { return _mm512_castsi512_ps(x); }
    static I load_bytes(const std::uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store_bytes(std::uint8_t* to, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
    }
    static I load_halves(const std::uint16_t* from) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static void store_halves(std::uint16_t* to, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
    }
    static F widen_float16(const std::uint16_t* from) { return load_float16(from); }
    static void narrow_float16(std::uint16_t* to, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_float16(x));
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
