// Rounding of floats to bfloat16 in vectors, for the widest lanes that the including file is compiled for.
//
// Owns the rounding alone. Internal linkage: each file's copy has the instructions of that file.
#pragma once

#include <immintrin.h>

namespace elixir::simd {

// To nearest, ties to even; every NaN becomes the quiet one. Not vcvtneps2bf16: that treats subnormals as zero.
#if defined(__AVX512F__)
static inline __m256i round_bfloat16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i to_even = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, to_even), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0)));
}
#else
static inline __m128i round_bfloat16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i to_even = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, to_even), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
#endif

}  // namespace elixir::simd
