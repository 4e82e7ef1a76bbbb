// The reference decoder: one element at a time, for any CPU. The SIMD decoders give the same bits, and use this one for
// the elements after their last whole vector.

#include <cmath>

#include "decode_kernel.hpp"
#include "float16.hpp"

namespace elixir {
namespace {

void store(void* out, Dtype dtype, std::size_t i, float value) {
    if (dtype == Dtype::float32) {
        static_cast<float*>(out)[i] = value;
    } else {
        static_cast<std::uint16_t*>(out)[i] = to_bfloat16(value);
    }
}

// Sign, four bits of exponent with bias 7, three of mantissa; no infinity, and one NaN of each sign.
float from_e4m3fn(std::uint8_t code) {
    const int magnitude = code & 0x7f;
    if (magnitude == 0x7f) return std::bit_cast<float>(kNan);
    const int exponent = magnitude >> 3;
    const int mantissa = magnitude & 7;
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return code & 0x80 ? -value : value;
}

}  // namespace

void nibbles_scalar(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
        const std::uint8_t pair = packed.codes[i / 2];
        const bool high = (i % 2 == 0) == packed.high_first;
        store(out, dtype, i, packed.values[high ? pair >> 4 : pair & 0xf] * scale_of(packed, i / packed.block));
    }
}

void octets_scalar(const std::uint8_t* codes, Octets::Code code, float scale, void* out, Dtype dtype,
                   std::size_t numel) {
    for (std::size_t i = 0; i < numel; ++i) {
        const float value = code == Octets::Code::e4m3fn ? from_e4m3fn(codes[i])
                                                         : static_cast<float>(static_cast<std::int8_t>(codes[i]));
        store(out, dtype, i, value * scale);
    }
}

}  // namespace elixir
