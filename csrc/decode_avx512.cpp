// Decoders on 16 lanes. Compiled with AVX-512F and BW; called only if the CPU has both.

#include "decode_simd.hpp"

namespace elixir {
namespace {

struct Avx512 : Vectors<16> {
    using Table = F;

    static HalfH narrow(I x) { return HalfH(_mm512_cvtepi32_epi16(__m512i(x))); }
    static I codes(const std::uint8_t* from) {
        return I(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    static F from_int8(const std::uint8_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }

    static Table times(const float* values, float scale) { return load<F>(values) * scale; }
    static void store_values(float* to, const Table& table, __m256i codes) {
        store<F>(to, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), table));
        store<F>(to + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), table));
    }

    /// 16 results as bfloat16, twice: a shuffle of words uses the lower five bits of a code, and the fifth belongs to
    /// another code.
    class Rounded {
      public:
        explicit Rounded(const Table& results)
            : words_(_mm512_broadcast_i64x4(__m256i(to_bfloat16<Avx512>(results)))) {}

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
