// Adam on 4 lanes, for both widths of state, on 64-bit ARM: every CPU of the family has them.

#include <arm_neon.h>

#include "adam_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Neon : Vectors<4> {
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F load_float16(const std::uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
    static HalfH to_float16(F x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
    // Plain stores: past the cache there are only those of two registers at a time.
    static void stream(std::uint16_t* to, HalfH x) { store(to, x); }
    static void fence() {}

    static I widen(HalfH x) { return vmovl_u16(x); }
    static H widen(Bytes x) { return vmovl_u8(x); }
    static HalfH narrow(I x) { return vmovn_u32(x); }
    static I low(H a) { return vshll_n_u16(vget_low_u16(a), 16); }
    static I high(H a) { return vshll_high_n_u16(a, 16); }
    static H pack(I low, I high) { return vcombine_u16(vmovn_u32(low), vmovn_u32(high)); }
    static H minus_or_zero(H a, H b) { return vqsubq_u16(a, b); }
    static std::uint32_t largest(H a) { return vmaxvq_u16(a); }
};

}  // namespace

void adam_neon(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Neon>(arrays, constants, begin, end);
}

void add_neon(float* total, const void* term, Dtype dtype, std::size_t begin, std::size_t end) {
    simd::add<Neon>(total, term, dtype, begin, end);
}

double norm_neon(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Neon>(grad, dtype, begin, end);
}

void narrow_neon(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Neon>(arrays, constants, begin, end);
}

}  // namespace elixir
