// Adam's scalars, the choice of a kernel, and the split over threads.

#include "adam.hpp"

#include <algorithm>
#include <cmath>
#include <system_error>
#include <thread>
#include <vector>

#include "adam_kernel.hpp"

namespace elixir {
namespace {

// A thread costs about 20 us to start and join, and this many elements (1.8 MB) keep one busy for some 200 us.
constexpr std::size_t kMinPerThread = std::size_t{1} << 16;

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
    c.eps = static_cast<float>(s.eps);
    c.neg_step_size = static_cast<float>(-(s.lr / correction1));
    return c;
}

AdamKernel* kernel_of(Isa isa) {
#ifdef ELIXIR_X86
    if (isa == Isa::avx512) return adam_avx512;
    if (isa == Isa::avx2) return adam_avx2;
#endif
    (void)isa;
    return adam_scalar;
}

}  // namespace

Isa best_isa() noexcept {
#ifdef ELIXIR_X86
    if (__builtin_cpu_supports("avx512f")) return Isa::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return Isa::avx2;
#endif
    return Isa::scalar;
}

void adam_step(const AdamArrays& arrays, const AdamSettings& settings, Isa isa, int threads) {
    const AdamConstants constants = constants_of(settings);
    AdamKernel* const kernel = kernel_of(isa);
    const std::size_t n = arrays.numel;
    const std::size_t parts =
        std::clamp<std::size_t>(n / kMinPerThread, 1, static_cast<std::size_t>(std::max(threads, 1)));
    // Whole pages of the smallest element type, so that two threads share no cache line of an aligned array.
    const std::size_t stride = (n / parts + 2047) / 2048 * 2048;

    // Threads are started per call: a pool would be one more thing to survive a fork, and costs more lines than it
    // saves time.
    std::vector<std::jthread> helpers;
    helpers.reserve(parts - 1);
    std::size_t begin = 0;
    try {
        for (; helpers.size() + 1 < parts; begin += stride) {
            helpers.emplace_back([=, &arrays, &constants] { kernel(arrays, constants, begin, begin + stride); });
        }
    } catch (const std::system_error&) {
        // No thread to be had: the caller's does the rest.
    }
    kernel(arrays, constants, begin, n);
}

}  // namespace elixir
