// Adam's scalars, the choice of a kernel, and the split over threads.

#include "adam.hpp"

#include <cmath>
#include <numeric>
#include <vector>

#include "adam_kernel.hpp"
#include "narrow_kernel.hpp"
#include "parts.hpp"

namespace elixir {
namespace {

// Elements of 28 bytes: 1.8 MB.
constexpr std::size_t kMinPerThread = std::size_t{1} << 16;
constexpr std::size_t kPageNumel = 2048;

AdamConstants constants_of(const AdamSettings& s) {
    const double step = static_cast<double>(s.step);
    const double correction1 = 1.0 - std::pow(s.beta1, step);
    const double correction2 = 1.0 - std::pow(s.beta2, step);
    const float lerp_weight = static_cast<float>(1.0 - s.beta1);
    const bool from_avg = std::abs(lerp_weight) < 0.5f;
    AdamConstants c{};
    c.grad_scale = static_cast<float>(s.maximize ? -s.grad_scale : s.grad_scale);
    c.l2_decay = s.decoupled ? 0.0f : static_cast<float>(s.weight_decay);
    c.shrink = s.decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0f;
    c.lerp_weight = from_avg ? lerp_weight : lerp_weight - 1.0f;
    c.lerp_from_avg = from_avg;
    c.beta2 = static_cast<float>(s.beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - s.beta2);
    c.sqrt_correction2 = static_cast<float>(std::pow(correction2, 0.5));
    c.one_over_sqrt_correction2 = static_cast<float>(1.0 / std::pow(correction2, 0.5));
    c.eps = static_cast<float>(s.eps);
    c.neg_step_size = static_cast<float>(-(s.lr / correction1));
    return c;
}

struct Kernels {
    AdamKernel* adam;
    NormKernel* norm;
    NarrowKernel* narrow;
    AddKernel* add;
};

Kernels kernels_of(Isa isa) {
#ifdef ELIXIR_X86
    if (isa == Isa::avx512) return {adam_avx512, norm_avx512, narrow_avx512, add_avx512};
    if (isa == Isa::avx2) return {adam_avx2, norm_avx2, narrow_avx2, add_avx2};
#endif
#ifdef ELIXIR_NEON
    if (isa == Isa::neon) return {adam_neon, norm_neon, narrow_neon, add_neon};
#endif
    (void)isa;
    return {adam_scalar, norm_scalar, narrow_scalar, add_scalar};
}

}  // namespace

Isa best_isa() noexcept {
#ifdef ELIXIR_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return Isa::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return Isa::avx2;
#endif
#ifdef ELIXIR_NEON
    return Isa::neon;
#else
    return Isa::scalar;
#endif
}

bool can_run(Isa isa) noexcept {
    const Isa best = best_isa();
    return isa == Isa::scalar || isa == best || (isa == Isa::avx2 && best == Isa::avx512);
}

void adam_step(const AdamArrays& arrays, const AdamSettings& settings, Isa isa, int threads) {
    const AdamConstants constants = constants_of(settings);
    AdamKernel* const kernel = kernels_of(isa).adam;
    const std::size_t n = arrays.numel;
    const std::size_t parts = parts_of(n, threads, kMinPerThread);
    // Cut at whole pages of the smallest element type, so that no two threads share a cache line of an aligned array.
    const auto start_of = [=](std::size_t part) { return n / kPageNumel * part / parts * kPageNumel; };
    const auto address_of = [&](std::size_t begin) { return arrays.master + begin; };
    in_parts(parts, n, start_of, address_of,
             [&](std::size_t, std::size_t begin, std::size_t end) { kernel(arrays, constants, begin, end); });
}

void narrow_step(const NarrowArrays& arrays, const AdamSettings& settings, Isa isa, int threads) {
    const AdamConstants constants = constants_of(settings);
    NarrowKernel* const kernel = kernels_of(isa).narrow;
    const std::size_t n = arrays.numel;
    const std::size_t parts = parts_of(n, threads, kMinPerThread);
    static_assert(kPageNumel % kCodeBlock == 0);
    const auto start_of = [=](std::size_t part) { return n / kPageNumel * part / parts * kPageNumel; };
    const std::size_t width = arrays.weight_dtype == Dtype::float32 ? 4 : 2;
    const auto address_of = [&](std::size_t begin) { return static_cast<const char*>(arrays.weight) + begin * width; };
    in_parts(parts, n, start_of, address_of,
             [&](std::size_t, std::size_t begin, std::size_t end) { kernel(arrays, constants, begin, end); });
}

void add_to(float* total, const void* term, Dtype dtype, std::size_t numel, Isa isa, int threads) {
    AddKernel* const kernel = kernels_of(isa).add;
    const std::size_t parts = parts_of(numel, threads, kMinPerThread);
    const auto start_of = [=](std::size_t part) { return numel / kPageNumel * part / parts * kPageNumel; };
    const auto address_of = [=](std::size_t begin) { return total + begin; };
    in_parts(parts, numel, start_of, address_of,
             [=](std::size_t, std::size_t begin, std::size_t end) { kernel(total, term, dtype, begin, end); });
}

double sum_of_squares(const void* grad, Dtype dtype, std::size_t numel, Isa isa, int threads) {
    NormKernel* const kernel = kernels_of(isa).norm;
    const std::size_t rows = numel / kNormRow;
    const std::size_t parts = parts_of(numel, threads, kMinPerThread);
    std::vector<double> sums(parts, 0.0);
    const auto start_of = [=](std::size_t part) { return rows * part / parts * kNormRow; };
    const std::size_t width = dtype == Dtype::float32 ? 4 : 2;
    const auto address_of = [=](std::size_t begin) { return static_cast<const char*>(grad) + begin * width; };
    in_parts(parts, numel, start_of, address_of, [&](std::size_t part, std::size_t begin, std::size_t end) {
        sums[part] = kernel(grad, dtype, begin, end);
    });
    return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace elixir
