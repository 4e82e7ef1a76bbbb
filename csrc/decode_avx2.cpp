// Decoders on 8 lanes. Compiled with AVX2; called only if the CPU has it.

#include "decode_simd.hpp"

namespace elixir {
namespace {

struct Avx2 : Vectors<8> {
    struct Table {
        F low, high;
    };

    static HalfH narrow(I x) {
        return HalfH(_mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1)));
    }
    static I codes(const std::uint8_t* from) {
        return I(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
    static F from_int8(const std::uint8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }

    static Table times(const float* values, float scale) {
        return {load<F>(values) * scale, load<F>(values + 8) * scale};
    }
    static void store_values(float* to, const Table& table, __m256i codes) {
        const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
        for (int i = 0; i < 4; ++i) {
            const __m128i bytes = i % 2 == 0 ? halves[i / 2] : _mm_srli_si128(halves[i / 2], 8);
            const __m256i code = _mm256_cvtepu8_epi32(bytes);
            const F upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // the sign bit says: 8 and above
            store<F>(to + 8 * i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code),
                                                  _mm256_permutevar8x32_ps(table.high, code), upper));
        }
    }

    /// 16 results as bfloat16, with low and high bytes separated for shuffles of bytes.
    class Rounded {
      public:
        explicit Rounded(const Table& results) {
            const auto first = __m128i(to_bfloat16<Avx2>(results.low));
            const auto second = __m128i(to_bfloat16<Avx2>(results.high));
            const __m128i byte = _mm_set1_epi16(0xff);
            low_ = twice(_mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
            high_ = twice(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
        }

        template <bool high_first, bool streamed>
        void store(std::uint16_t* to, const std::uint8_t* from) const {
            const __m256i codes = simd::codes_of<Avx2, high_first>(from);
            const __m256i lows = _mm256_shuffle_epi8(low_, codes);
            const __m256i highs = _mm256_shuffle_epi8(high_, codes);
            const __m256i even = _mm256_unpacklo_epi8(lows, highs);  // elements 0 to 7 and 16 to 23
            const __m256i odd = _mm256_unpackhi_epi8(lows, highs);
            const __m256i first = _mm256_permute2x128_si256(even, odd, 0x20);
            const __m256i second = _mm256_permute2x128_si256(even, odd, 0x31);
            __m256i* const words = reinterpret_cast<__m256i*>(to);
            if constexpr (streamed) {
                _mm256_stream_si256(words, first);
                _mm256_stream_si256(words + 1, second);
            } else {
                _mm256_storeu_si256(words, first);
                _mm256_storeu_si256(words + 1, second);
            }
        }

      private:
        static __m256i twice(__m128i x) { return _mm256_broadcastsi128_si256(x); }

        __m256i low_, high_;
    };
};

}  // namespace

void nibbles_avx2(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end) {
    simd::nibbles<Avx2>(packed, out, dtype, begin, end);
}

void octets_avx2(const std::uint8_t* codes, Octets::Code code, float scale, void* out, Dtype dtype, std::size_t numel) {
    simd::octets<Avx2>(codes, code, scale, out, dtype, numel);
}

}  // namespace elixir
