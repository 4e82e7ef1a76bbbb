// BLAKE2b of 8 messages at once. Compiled with AVX-512F; called only where the CPU has it.

#include <immintrin.h>

#include "blake2b_kernel.hpp"

namespace elixir {
namespace {

struct Avx512 {
    using W = __m512i;
    static constexpr std::size_t width = 8;

    static W set(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
    static W add(W a, W b) { return _mm512_add_epi64(a, b); }
    static W xor_(W a, W b) { return _mm512_xor_si512(a, b); }
    template <int bits>
    static W rotate(W a) {
        return _mm512_ror_epi64(a, bits);
    }
    static W gather(const std::uint8_t* from, std::size_t stride) {
        return _mm512_i64gather_epi64(lanes(stride), from, 1);
    }
    static void scatter(std::uint8_t* to, std::size_t stride, W words) {
        _mm512_i64scatter_epi64(to, lanes(stride), words, 1);
    }
    static W lanes(std::size_t stride) {
        const auto s = static_cast<long long>(stride);
        return _mm512_setr_epi64(0, s, 2 * s, 3 * s, 4 * s, 5 * s, 6 * s, 7 * s);
    }
};

}  // namespace

std::size_t blake2b_avx512(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests) {
    return blake::groups<Avx512>(messages, count, length, digests);
}

}  // namespace elixir
