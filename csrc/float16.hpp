// float16 to float and back, and float to bfloat16, one at a time, for any CPU. In an unnamed namespace: each including
// file has its own copy (see adam_kernel.hpp).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace elixir {
namespace {

inline std::uint16_t to_bfloat16(float value) {
    if (std::isnan(value)) return 0x7fc0;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t to_even = 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>((bits + to_even) >> 16);
}

inline float from_float16(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1f;
    const std::uint32_t mantissa = half & 0x3ff;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // zero and the subnormals, exactly
    return sign ? -magnitude : magnitude;
}

inline std::uint16_t to_float16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t magnitude = bits & 0x7fffffff;
    std::uint32_t half;
    if (magnitude > 0x7f800000) {
        half = 0x7e00 | ((magnitude >> 13) & 0x3ff);  // a quiet NaN with the upper bits of its payload
    } else if (magnitude >= 0x477ff000) {
        half = 0x7c00;  // 65520 and above round to infinity
    } else if (magnitude < 0x38800000) {
        // Below 2^-14, halves are 2^-24 apart, like floats just above 0.5: the addition rounds to even.
        const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
        half = std::bit_cast<std::uint32_t>(aligned) - 0x3f000000;
    } else {
        const std::uint32_t to_even = 0xfff + ((magnitude >> 13) & 1);
        half = (magnitude + to_even - (112u << 23)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

}  // namespace
}  // namespace elixir
