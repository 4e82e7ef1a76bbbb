#include "tiles.hpp"

#ifdef ELIXIR_X86
#include <cpuid.h>
#endif

namespace elixir {

bool tiles_trap() noexcept {
#ifdef ELIXIR_X86
    constexpr unsigned kFeatures = 7, kTiles = 0x1d, kPalette = 1, kAmxTile = 1U << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) || !(d & kAmxTile)) return false;
    return !__get_cpuid_count(kTiles, kPalette, &a, &b, &c, &d) || a == 0;
#else
    return false;
#endif
}

}  // namespace elixir
