// Adam on 4 lanes, for both widths of state, on 64-bit ARM: every CPU of the family has them.

#include <arm_neon.h>

#include "adam_simd.hpp"
#include "narrow_blocks.hpp"

namespace elixir {
namespace {

struct Neon {
    using F = float32x4_t;
    static constexpr std::size_t width = 4;

    static F load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, F x) { vst1q_f32(to, x); }
    static F set(float x) { return vdupq_n_f32(x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

    static F load_bfloat16(const std::uint16_t* from) { return floats(vshll_n_u16(vld1_u16(from), 16)); }
    static F load_float16(const std::uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
    static uint16x4_t round_bfloat16(F x) {
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits(x), 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits(x), vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        return vmovn_u32(replace_nan(vshrq_n_u32(rounded, 16), x, 0x7fc0));
    }
    static uint16x4_t round_float16(F x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
    // Plain stores: past the cache there are only those of two registers at a time.
    static void stream(std::uint16_t* to, uint16x4_t x) { vst1_u16(to, x); }
    static void fence() {}

    using I = uint32x4_t;
    static I bits(F x) { return vreinterpretq_u32_f32(x); }
    static F floats(I x) { return vreinterpretq_f32_u32(x); }
    static I word(std::uint32_t x) { return vdupq_n_u32(x); }
    static I low_places() { return I{0, 1, 2, 3}; }
    static I high_places() { return I{4, 5, 6, 7}; }
    static I plus(I a, I b) { return vaddq_u32(a, b); }
    static I times(I a, I b) { return vmulq_u32(a, b); }
    static I both(I a, I b) { return vandq_u32(a, b); }
    static I differ(I a, I b) { return veorq_u32(a, b); }
    template <int n>
    static I right(I a) {
        return vshrq_n_u32(a, n);
    }
    static I larger(I a, I b) { return vmaxq_u32(a, b); }
    static I smaller(I a, I b) { return vminq_u32(a, b); }
    static I replace_nan(I value, F tested, std::uint32_t by) {
        return vbslq_u32(vceqq_f32(tested, tested), value, word(by));
    }

    struct H {
        uint16x8_t x;
    };
    static H half(std::uint16_t x) { return {vdupq_n_u16(x)}; }
    static I low(H a) { return vshll_n_u16(vget_low_u16(a.x), 16); }
    static I high(H a) { return vshll_high_n_u16(a.x, 16); }
    static H pack(I low, I high) { return {vcombine_u16(vmovn_u32(low), vmovn_u32(high))}; }
    static H plus(H a, H b) { return {vaddq_u16(a.x, b.x)}; }
    static H minus_or_zero(H a, H b) { return {vqsubq_u16(a.x, b.x)}; }
    static H both(H a, H b) { return {vandq_u16(a.x, b.x)}; }
    static H either(H a, H b) { return {vorrq_u16(a.x, b.x)}; }
    static H differ(H a, H b) { return {veorq_u16(a.x, b.x)}; }
    template <int n>
    static H right(H a) {
        return {vshrq_n_u16(a.x, n)};
    }
    template <int n>
    static H left(H a) {
        return {vshlq_n_u16(a.x, n)};
    }
    static H larger(H a, H b) { return {vmaxq_u16(a.x, b.x)}; }
    static H smaller(H a, H b) { return {vminq_u16(a.x, b.x)}; }
    static H zero_where_zero(H value, H tested) { return {vandq_u16(vtstq_u16(tested.x, tested.x), value.x)}; }
    static std::uint32_t largest(H a) { return vmaxvq_u16(a.x); }

    static Floats<Neon> load_floats(const float* from) { return {load(from), load(from + width)}; }
    static void store_floats(float* to, Floats<Neon> x) {
        store(to, x.low);
        store(to + width, x.high);
    }
    static Floats<Neon> load_float16s(const std::uint16_t* from) {
        return {load_float16(from), load_float16(from + width)};
    }
    static void store_float16s(std::uint16_t* to, Floats<Neon> x) {
        store_halves(to, {vcombine_u16(round_float16(x.low), round_float16(x.high))});
    }
    static H load_halves(const std::uint16_t* from) { return {vld1q_u16(from)}; }
    static void store_halves(std::uint16_t* to, H x) { vst1q_u16(to, x.x); }
    static H load_bytes(const std::uint8_t* from) { return {vmovl_u8(vld1_u8(from))}; }
    static void store_bytes(std::uint8_t* to, H x) { vst1_u8(to, vmovn_u16(x.x)); }
};

}  // namespace

void adam_neon(const AdamArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    simd::adam<Neon>(arrays, constants, begin, end);
}

double norm_neon(const void* grad, Dtype dtype, std::size_t begin, std::size_t end) {
    return simd::norm<Neon>(grad, dtype, begin, end);
}

void narrow_neon(const NarrowArrays& arrays, const AdamConstants& constants, std::size_t begin, std::size_t end) {
    narrow_all<Neon>(arrays, constants, begin, end);
}

}  // namespace elixir
