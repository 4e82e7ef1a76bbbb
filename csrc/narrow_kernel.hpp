// Signatures of the kernels for narrow state, shared by the instruction sets. Nothing here may be an inline
// function (see adam_kernel.hpp).
#pragma once

#include "adam_kernel.hpp"
#include "narrow.hpp"

namespace elixir {

/// Updates elements [begin, end); `begin` is a multiple of kCodeBlock.
using NarrowKernel = void(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin,
                          std::size_t end);

NarrowKernel narrow_scalar;
NarrowKernel narrow_avx2;
NarrowKernel narrow_avx512;
NarrowKernel narrow_neon;

}  // namespace elixir
