// BLAKE2b, one message at a time, and the choice of a kernel.

#include "blake2b.hpp"

#include <bit>
#include <cstring>

#include "blake2b_kernel.hpp"

namespace elixir {
namespace {

static_assert(std::endian::native == std::endian::little, "words of BLAKE2b are little-endian");

struct Word {
    using W = std::uint64_t;
    static constexpr std::size_t width = 1;

    static W set(std::uint64_t x) { return x; }
    static W add(W a, W b) { return a + b; }
    static W xor_(W a, W b) { return a ^ b; }
    template <int bits>
    static W rotate(W a) {
        return std::rotr(a, bits);
    }
    static W gather(const std::uint8_t* from, std::size_t) {
        W word;
        std::memcpy(&word, from, sizeof word);
        return word;
    }
    static void scatter(std::uint8_t* to, std::size_t, W word) { std::memcpy(to, &word, sizeof word); }
};

std::size_t in_groups(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests,
                      Isa isa) {
#ifdef ELIXIR_X86
    if (isa == Isa::avx512) return blake2b_avx512(messages, count, length, digests);
    if (isa == Isa::avx2) return blake2b_avx2(messages, count, length, digests);
#endif
    (void)messages, (void)count, (void)length, (void)digests, (void)isa;
    return 0;
}

}  // namespace

void blake2b(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests, Isa isa) {
    const std::size_t done = in_groups(messages, count, length, digests, isa);
    blake::groups<Word>(messages + done * length, count - done, length, digests + done * kBlake2bDigest);
}

}  // namespace elixir
