// Quantized weights in host memory to float32 or bfloat16: codes and scales in, the fp32 product value(code) * scale
// out, rounded to nearest even.
//
// Knows nothing of Python. Arrays are plain pointers; the caller guarantees their length. Allocates only for threads.
//
// Every instruction set gives the same bits. A NaN scale or code gives the NaN 0x7fc00000 (bfloat16: 0x7fc0).
#pragma once

#include "adam.hpp"

namespace elixir {

/// Codes of four bits, two per byte: NF4 and MXFP4.
///
///     byte     0        1                  block / 2 - 1
///            | 0 . 1 | 2 . 3 | ...       | . block - 1 | ...    elements; the first is in the high or the low nibble
///     scale  | scales[0] ................................ | scales[1] ...
struct Nibbles {
    const std::uint8_t* codes;      // (numel + 1) / 2 bytes
    const float* scales;            // one a block, the last block may be short; null if the scales are e8m0
    const std::uint8_t* exponents;  // the scales as E8M0 bytes: 2^(byte - 127), 255 is NaN
    const float* values;            // 16: what each code stands for
    std::size_t block;              // elements that share a scale; a multiple of 32
    bool high_first;
    std::size_t numel;
};

/// Codes of eight bits, with a scale for each block of a matrix. FP8 has blocks of 128 x 128, int8 has one for each
/// row.
struct Octets {
    enum class Code : std::uint8_t { e4m3fn, int8 };

    const std::uint8_t* codes;  // (matrices, rows, cols)
    const float* scales;        // (matrices, ceil(rows / block_rows), ceil(cols / block_cols))
    Code code;
    std::size_t matrices, rows, cols;
    std::size_t block_rows, block_cols;
};

/// Writes `numel` elements of `dtype`, float32 or bfloat16, to `out`, which overlaps nothing. At most `threads` threads
/// work. `isa` must be no better than best_isa().
void decode_nibbles(const Nibbles& packed, void* out, Dtype dtype, Isa isa, int threads);

/// Like decode_nibbles, for (matrices, rows, cols) elements.
void decode_octets(const Octets& packed, void* out, Dtype dtype, Isa isa, int threads);

}  // namespace elixir
