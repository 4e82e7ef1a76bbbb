// The choice of a decoder, the split over threads, and the walk over the blocks of matrices.

#include "decode.hpp"

#include "decode_kernel.hpp"
#include "parts.hpp"

namespace elixir {
namespace {

// 650 KB with four bits to bfloat16.
constexpr std::size_t kMinPerThread = std::size_t{1} << 18;

struct Kernels {
    NibblesKernel* nibbles;
    OctetsKernel* octets;
};

Kernels kernels_of(Isa isa) {
#ifdef ELIXIR_X86
    if (isa == Isa::avx512) return {nibbles_avx512, octets_avx512};
    if (isa == Isa::avx2) return {nibbles_avx2, octets_avx2};
#endif
    (void)isa;
    return {nibbles_scalar, octets_scalar};
}

std::size_t width_of(Dtype dtype) {
    return dtype == Dtype::float32 ? 4 : 2;
}

// Rows [begin, end) of all matrices, one run of codes with one scale after another.
void decode_rows(const Octets& p, OctetsKernel* kernel, char* out, Dtype dtype, std::size_t begin, std::size_t end) {
    const std::size_t blocks_down = (p.rows + p.block_rows - 1) / p.block_rows;
    const std::size_t blocks_across = (p.cols + p.block_cols - 1) / p.block_cols;
    const std::size_t width = width_of(dtype);
    for (std::size_t row = begin; row < end; ++row) {
        const std::size_t down = row / p.rows * blocks_down + row % p.rows / p.block_rows;
        const float* const scales = p.scales + down * blocks_across;
        for (std::size_t across = 0; across < blocks_across; ++across) {
            const std::size_t first = across * p.block_cols;
            const std::size_t numel = std::min(p.block_cols, p.cols - first);
            const std::size_t i = row * p.cols + first;
            kernel(p.codes + i, p.code, with_one_nan(scales[across]), out + i * width, dtype, numel);
        }
    }
}

}  // namespace

void decode_nibbles(const Nibbles& packed, void* out, Dtype dtype, Isa isa, int threads) {
    NibblesKernel* const kernel = kernels_of(isa).nibbles;
    const std::size_t blocks = packed.numel / packed.block;
    const std::size_t parts = parts_of(packed.numel, threads, kMinPerThread);
    const auto start_of = [&](std::size_t part) { return blocks * part / parts * packed.block; };
    const auto address_of = [&](std::size_t begin) { return static_cast<const char*>(out) + begin * width_of(dtype); };
    in_parts(parts, packed.numel, start_of, address_of,
             [&](std::size_t, std::size_t begin, std::size_t end) { kernel(packed, out, dtype, begin, end); });
}

void decode_octets(const Octets& packed, void* out, Dtype dtype, Isa isa, int threads) {
    OctetsKernel* const kernel = kernels_of(isa).octets;
    const std::size_t rows = packed.matrices * packed.rows;
    const std::size_t parts =
        std::min(parts_of(rows * packed.cols, threads, kMinPerThread), std::max<std::size_t>(rows, 1));
    char* const to = static_cast<char*>(out);
    const auto start_of = [=](std::size_t part) { return rows * part / parts; };
    const auto address_of = [&](std::size_t row) { return to + row * packed.cols * width_of(dtype); };
    in_parts(parts, rows, start_of, address_of, [&](std::size_t, std::size_t begin, std::size_t end) {
        decode_rows(packed, kernel, to, dtype, begin, end);
    });
}

}  // namespace elixir
