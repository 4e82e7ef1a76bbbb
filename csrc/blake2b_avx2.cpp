// BLAKE2b of 4 messages at once. Compiled with AVX2; called only where the CPU has it.

#include <immintrin.h>

#include "blake2b_kernel.hpp"

namespace elixir {
namespace {

struct Avx2 {
    using W = __m256i;
    static constexpr std::size_t width = 4;

    static W set(std::uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
    static W add(W a, W b) { return _mm256_add_epi64(a, b); }
    static W xor_(W a, W b) { return _mm256_xor_si256(a, b); }
    template <int bits>
    static W rotate(W a) {
        if constexpr (bits == 63) return _mm256_or_si256(_mm256_add_epi64(a, a), _mm256_srli_epi64(a, 63));
        if constexpr (bits == 32) return _mm256_shuffle_epi32(a, _MM_SHUFFLE(2, 3, 0, 1));
        constexpr int b = bits / 8;
        const W order = _mm256_setr_epi8(
            b % 8, (b + 1) % 8, (b + 2) % 8, (b + 3) % 8, (b + 4) % 8, (b + 5) % 8, (b + 6) % 8, (b + 7) % 8, 8 + b % 8,
            8 + (b + 1) % 8, 8 + (b + 2) % 8, 8 + (b + 3) % 8, 8 + (b + 4) % 8, 8 + (b + 5) % 8, 8 + (b + 6) % 8,
            8 + (b + 7) % 8, b % 8, (b + 1) % 8, (b + 2) % 8, (b + 3) % 8, (b + 4) % 8, (b + 5) % 8, (b + 6) % 8,
            (b + 7) % 8, 8 + b % 8, 8 + (b + 1) % 8, 8 + (b + 2) % 8, 8 + (b + 3) % 8, 8 + (b + 4) % 8, 8 + (b + 5) % 8,
            8 + (b + 6) % 8, 8 + (b + 7) % 8);
        return _mm256_shuffle_epi8(a, order);
    }
    static W gather(const std::uint8_t* from, std::size_t stride) {
        const auto s = static_cast<long long>(stride);
        const W at = _mm256_setr_epi64x(0, s, 2 * s, 3 * s);
        return _mm256_i64gather_epi64(reinterpret_cast<const long long*>(from), at, 1);
    }
    static void scatter(std::uint8_t* to, std::size_t stride, W words) {
        alignas(32) std::uint64_t lanes[width];
        _mm256_store_si256(reinterpret_cast<W*>(lanes), words);
        for (std::size_t i = 0; i < width; ++i) __builtin_memcpy(to + i * stride, &lanes[i], sizeof lanes[i]);
    }
};

}  // namespace

std::size_t blake2b_avx2(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests) {
    return blake::groups<Avx2>(messages, count, length, digests);
}

}  // namespace elixir
