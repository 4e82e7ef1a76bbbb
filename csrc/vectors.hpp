// Registers as the vector types of GCC and Clang, whose operators work on every element, and the code that is the same
// for every instruction set.
//
// Owns only types and functions of internal linkage: each file's copy has the instructions of that file.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace elixir {
namespace {

/// Registers of `n` floats, `n` words of 32 bits and 2 * n halves of 16 bits, and parts of a register.
template <std::size_t n>
struct Vectors {
    static constexpr std::size_t width = n;
    using F [[gnu::vector_size(4 * n)]] = float;
    using I [[gnu::vector_size(4 * n)]] = std::uint32_t;
    using H [[gnu::vector_size(4 * n)]] = std::uint16_t;
    using HalfH [[gnu::vector_size(2 * n)]] = std::uint16_t;
    using Bytes [[gnu::vector_size(2 * n)]] = std::uint8_t;
    struct Floats {
        F low, high;
    };

    /// Two registers in the order of memory to the order of `low` and `high` (narrow_blocks.hpp), and back. They are
    /// the same up to 128 bits.
    static Floats to_parts(F first, F second) { return {first, second}; }
    static Floats in_order(Floats x) { return x; }
};

/// A register from any address, and to it.
template <class Register>
inline Register load(const void* from) {
    Register x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
template <class Register>
inline void store(void* to, Register x) {
    std::memcpy(to, &x, sizeof x);
}

/// `x` in every element; adding it to zeros would lose the sign of -0.
template <class F>
inline F set(float x) {
    return x - F{};
}

template <class Register>
inline Register larger(Register a, Register b) {
    return a > b ? a : b;
}

template <class Register>
inline Register smaller(Register a, Register b) {
    return a < b ? a : b;
}

// Kernels bring `widen` and `narrow`: GCC 12 makes several instructions of __builtin_convertvector where there is one.
template <class V>
inline typename V::F from_bfloat16(typename V::HalfH bits) {
    return std::bit_cast<typename V::F>(V::widen(bits) << 16);
}

/// To nearest, ties to even; every NaN becomes the quiet one. Not vcvtneps2bf16: that treats subnormals as zero.
template <class V>
inline typename V::I nearest_bfloat16(typename V::F x) {
    const auto bits = std::bit_cast<typename V::I>(x);
    const auto rounded = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
    return x == x ? rounded : typename V::I{} + 0x7fc0;
}

template <class V>
inline typename V::HalfH to_bfloat16(typename V::F x) {
    return V::narrow(nearest_bfloat16<V>(x));
}

}  // namespace
}  // namespace elixir
