// Decoders on 16 lanes. Compiled with AVX-512F and BW; called only if the CPU has both.

#include "bfloat16_simd.hpp"
#include "decode_simd.hpp"

namespace elixir {
namespace {

struct Avx512 {
    using F = __m512;
    static constexpr std::size_t width = 16;
    using Table = F;

    static F set(float x) { return _mm512_set1_ps(x); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }

    static void store(float* to, F x) { _mm512_storeu_ps(to, x); }
    static void store(std::uint16_t* to, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), simd::round_bfloat16(x));
    }

    static F from_e4m3fn(const std::uint8_t* from) {
        const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
        const __m512i shifted = _mm512_slli_epi32(magnitude, 20);
        const F normal = _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(120 << 23)));
        // Below 2^-6: its mantissa on top of 2^-6, which is then taken away. No operand of any instruction is
        // subnormal.
        const F raised = _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(121 << 23)));
        const F small = _mm512_sub_ps(raised, _mm512_set1_ps(0x1p-6f));
        const __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
        const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
        const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(code, magnitude), 24);
        const __m512i value = _mm512_or_si512(_mm512_castps_si512(_mm512_mask_mov_ps(normal, is_small, small)), sign);
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(value, is_nan, _mm512_set1_epi32(kNan)));
    }
    static F from_int8(const std::uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }

    static Table times(const float* values, float scale) { return mul(_mm512_loadu_ps(values), set(scale)); }
    static void store_values(float* to, const Table& table, __m256i codes) {
        store(to, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), table));
        store(to + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), table));
    }

    /// 16 results as bfloat16, twice: a shuffle of words minds the lower five bits of a code, and the fifth is
    /// another's.
    class Rounded {
      public:
        explicit Rounded(const Table& results) : words_(_mm512_broadcast_i64x4(simd::round_bfloat16(results))) {}

        template <bool high_first, bool streamed>
        void store(std::uint16_t* to, const std::uint8_t* from) const {
            const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            // The code of the first element to the lower word of its pair, that of the second to the upper word.
            const __m512i codes = high_first
                                      ? _mm512_or_epi32(_mm512_srli_epi32(pairs, 4), _mm512_slli_epi32(pairs, 16))
                                      : _mm512_or_epi32(pairs, _mm512_slli_epi32(pairs, 12));
            const __m512i found = _mm512_permutexvar_epi16(codes, words_);
            if constexpr (streamed) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(to), found);
            } else {
                _mm512_storeu_si512(to, found);
            }
        }

      private:
        __m512i words_;
    };
};

}  // namespace

void nibbles_avx512(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end) {
    simd::nibbles<Avx512>(packed, out, dtype, begin, end);
}

void octets_avx512(const std::uint8_t* codes, Octets::Code code, float scale, void* out, Dtype dtype,
                   std::size_t numel) {
    simd::octets<Avx512>(codes, code, scale, out, dtype, numel);
}

}  // namespace elixir
