// Signatures shared by the decoders of the three instruction sets. Included by csrc/decode*.cpp only.
//
// Nothing here may be an inline function with external linkage: the kernels are compiled for different instruction
// sets, and the linker keeps one copy of such a function, possibly one that this CPU cannot run.
#pragma once

#include <bit>

#include "decode.hpp"

namespace elixir {

/// Decodes elements [begin, end); `begin` is even.
using NibblesKernel = void(const Nibbles& packed, void* out, Dtype dtype, std::size_t begin, std::size_t end);

/// Decodes `numel` codes that share a scale.
using OctetsKernel = void(const std::uint8_t* codes, Octets::Code code, float scale, void* out, Dtype dtype,
                          std::size_t numel);

NibblesKernel nibbles_scalar;
NibblesKernel nibbles_avx2;
NibblesKernel nibbles_avx512;

OctetsKernel octets_scalar;
OctetsKernel octets_avx2;
OctetsKernel octets_avx512;

namespace {

constexpr std::uint32_t kNan = 0x7fc00000;

/// The same NaN for all: the payload of a product of two NaNs depends on the order in which a compiler multiplies.
[[maybe_unused]] float with_one_nan(float scale) {
    return scale == scale ? scale : std::bit_cast<float>(kNan);
}

/// The scale of a block.
[[maybe_unused]] float scale_of(const Nibbles& packed, std::size_t block) {
    if (packed.scales != nullptr) return with_one_nan(packed.scales[block]);
    const std::uint32_t exponent = packed.exponents[block];
    if (exponent == 0xff) return std::bit_cast<float>(kNan);
    return std::bit_cast<float>(exponent == 0 ? 0x400000u : exponent << 23);  // 2^-127 is subnormal
}

}  // namespace
}  // namespace elixir
