// BLAKE2b on as many messages at once as a vector has lanes of 64 bits, for vectors of any width.
//
// Included by one file per instruction set. A vector type `V` says: W, width, set, add, xor_, rotate<bits>, gather (one
// word from each message) and scatter (one word to each digest).
#pragma once

#include <array>

#include "blake2b.hpp"

namespace elixir {

/// Hashes the messages in groups of the vector's width; returns how many that were.
using Blake2bKernel = std::size_t(const std::uint8_t* messages, std::size_t count, std::size_t length,
                                  std::uint8_t* digests);

Blake2bKernel blake2b_avx2;
Blake2bKernel blake2b_avx512;

namespace blake {

inline constexpr std::array<std::uint64_t, 8> kStart = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
inline constexpr std::uint64_t kParameters = 0x01010000 ^ kBlake2bDigest;
inline constexpr std::uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

template <class V>
inline void mix(typename V::W& a, typename V::W& b, typename V::W& c, typename V::W& d, typename V::W x,
                typename V::W y) {
    a = V::add(V::add(a, b), x);
    d = V::template rotate<32>(V::xor_(d, a));
    c = V::add(c, d);
    b = V::template rotate<24>(V::xor_(b, c));
    a = V::add(V::add(a, b), y);
    d = V::template rotate<16>(V::xor_(d, a));
    c = V::add(c, d);
    b = V::template rotate<63>(V::xor_(b, c));
}

template <class V, int round>
inline void mix_all(typename V::W (&v)[16], const typename V::W (&m)[16]) {
    constexpr auto& s = kOrder[round % 10];
    mix<V>(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix<V>(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix<V>(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix<V>(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix<V>(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix<V>(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix<V>(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix<V>(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    if constexpr (round < 11) mix_all<V, round + 1>(v, m);
}

template <class V>
std::size_t groups(const std::uint8_t* messages, std::size_t count, std::size_t length, std::uint8_t* digests) {
    using W = typename V::W;
    std::size_t done = 0;
    for (; done + V::width <= count; done += V::width) {
        const std::uint8_t* const first = messages + done * length;
        W h[8];
        for (int i = 0; i < 8; ++i) h[i] = V::set(kStart[i]);
        h[0] = V::xor_(h[0], V::set(kParameters));
        for (std::size_t at = 0; at < length; at += kBlake2bBlock) {
            W m[16], v[16];
            for (int i = 0; i < 16; ++i) m[i] = V::gather(first + at + 8 * i, length);
            for (int i = 0; i < 8; ++i) v[i] = h[i], v[i + 8] = V::set(kStart[i]);
            v[12] = V::xor_(v[12], V::set(at + kBlake2bBlock));
            if (at + kBlake2bBlock == length) v[14] = V::xor_(v[14], V::set(~std::uint64_t{0}));
            mix_all<V, 0>(v, m);
            for (int i = 0; i < 8; ++i) h[i] = V::xor_(h[i], V::xor_(v[i], v[i + 8]));
        }
        for (std::size_t i = 0; i < kBlake2bDigest / 8; ++i) {
            V::scatter(digests + done * kBlake2bDigest + 8 * i, kBlake2bDigest, h[i]);
        }
    }
    return done;
}

}  // namespace blake
}  // namespace elixir
