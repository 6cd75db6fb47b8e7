// Vectors of AVX2, FMA and F16C: two registers of 8 lanes.
#pragma once

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
struct Mask {
    __m256 low, high;
};
using First = long;

constexpr int VECTOR_REGISTERS = 8;  // of 16 lanes

INLINE Floats operator+(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
INLINE Floats operator-(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
INLINE Floats operator*(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
INLINE Floats operator/(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints lane_numbers() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
INLINE Ints add_ints(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
INLINE Mask is_above(Ints a, int32_t b) {
    const __m256i bound = _mm256_set1_epi32(b);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.low, bound)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.high, bound))};
}

INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void store(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
INLINE First first_lanes(long count) { return count; }
INLINE Ints bits_of(First lanes) {
    const Ints numbers = lane_numbers();
    const __m256i count = _mm256_set1_epi32((int32_t)lanes);
    return {_mm256_cmpgt_epi32(count, numbers.low), _mm256_cmpgt_epi32(count, numbers.high)};
}
// The other lanes are 0, and are not written. Whole vectors are stored without a mask, because masked
// stores are slow on some processors.
INLINE Floats load(const float* from, First lanes) {
    if (lanes >= LANES) return load(from);
    const Ints mask = bits_of(lanes);
    return {_mm256_maskload_ps(from, mask.low), _mm256_maskload_ps(from + 8, mask.high)};
}
INLINE void store(float* to, Floats x, First lanes) {
    if (lanes >= LANES) return store(to, x);
    const Ints mask = bits_of(lanes);
    _mm256_maskstore_ps(to, mask.low, x.low);
    _mm256_maskstore_ps(to + 8, mask.high, x.high);
}
INLINE Floats load_float16(const uint8_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16)))};
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE Floats subtract_product(Floats c, Floats a, Floats b) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats larger(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
INLINE Floats smaller(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
INLINE Floats absolute(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
INLINE __m256 round_to_even(__m256 x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE Floats round_to_even(Floats x) { return {round_to_even(x.low), round_to_even(x.high)}; }
// x * 2^n for an integer n from -252 to 254 and x near 1. In two steps with representable powers: the
// first step is exact, so the result is rounded once, even if it is subnormal.
INLINE __m256 times_power(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    const __m256i one = _mm256_set1_epi32(127);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, one), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), one), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}
INLINE Floats times_power(Floats x, Floats n) {
    return {times_power(x.low, n.low), times_power(x.high, n.high)};
}

// Rounded to nearest, ties to even; INT_MIN if there is no such integer.
INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
INLINE void store_int8(int8_t* to, Ints x) {
    // Packing works in each half of a register: quarters 1 and 2 change places.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xD8);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(words),
                                                   _mm256_extracti128_si256(words, 1)));
}
INLINE int sum_of(Ints x) {
    const __m256i half = _mm256_add_epi32(x.low, x.high);
    __m128i quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    quarter = _mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(quarter, _mm_shuffle_epi32(quarter, 0xB1)));
}

INLINE bool has_nan(Floats a, Floats b) {
    const __m256 low = _mm256_cmp_ps(a.low, b.low, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(low, _mm256_cmp_ps(a.high, b.high, _CMP_UNORD_Q)));
}
INLINE Mask is_at_most(Ints a, int32_t b) {
    const Mask above = is_above(a, b);
    const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    return {_mm256_xor_ps(above.low, all), _mm256_xor_ps(above.high, all)};
}
INLINE Mask is_not(Floats a, float b) {
    const __m256 bound = _mm256_set1_ps(b);
    return {_mm256_cmp_ps(a.low, bound, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, bound, _CMP_NEQ_UQ)};
}
INLINE Mask both(Mask a, Mask b) {
    return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)};
}
INLINE Floats where(Mask mask, Floats x, Floats other) {
    return {_mm256_blendv_ps(other.low, x.low, mask.low), _mm256_blendv_ps(other.high, x.high, mask.high)};
}
INLINE Floats where(Mask mask, Floats x) {
    return {_mm256_and_ps(mask.low, x.low), _mm256_and_ps(mask.high, x.high)};
}

INLINE float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }
INLINE __m256 low_half(Floats x) { return x.low; }
INLINE __m256 high_half(Floats x) { return x.high; }

// From four vectors: lane j of each quarter is a part of the sum of row j.
INLINE __m256 quarters_of(__m256 x, __m256 y, __m256 z, __m256 w) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(z, w), _mm256_unpackhi_ps(z, w));
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
}
// The sum of the two halves of a, and that of b.
INLINE __m256 halves_of(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
// The sums of the lanes of row(0) to row(15), each in its lane: quarters 0 and 1, 2 and 3, then those
// two. Four rows at a time, because all would not fit the registers.
template <typename Row>
INLINE Floats sums_of(Row row) {
    __m256 low[4], high[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const Floats r[4] = {row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)};
        low[i] = quarters_of(r[0].low, r[1].low, r[2].low, r[3].low);
        high[i] = quarters_of(r[0].high, r[1].high, r[2].high, r[3].high);
    }
    return {_mm256_add_ps(halves_of(low[0], low[1]), halves_of(high[0], high[1])),
            _mm256_add_ps(halves_of(low[2], low[3]), halves_of(high[2], high[3]))};
}

INLINE __m256i load_bytes(const uint8_t* from) { return _mm256_load_si256((const __m256i*)from); }
INLINE __m256i four_inputs(const int8_t* from) {
    int32_t four;
    memcpy(&four, from, sizeof(four));
    return _mm256_set1_epi32(four);
}

// As in vectors_avx512.h. AVX2 has no byte multiplication with an exact sum in 32 bits. The sum for
// two weights up to 15 and two inputs is at most 3,840, in 16 bits, and eight such sums still fit. An
// 8-bit weight is multiplied as 16 times its upper half, plus its lower half. Loops over inputs are
// not unrolled: unrolled, the compiler would keep all inputs in registers, which are too few.
template <int R>
INLINE void int4_dots(const uint8_t* values, const int8_t* inputs, long stride, Ints* dots) {
    const __m256i bits = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    __m256i low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m256i a = load_bytes(values + 64 * j), b = load_bytes(values + 64 * j + 32);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            const __m256i c = _mm256_and_si256(part ? _mm256_srli_epi16(a, 4) : a, bits);
            const __m256i d = _mm256_and_si256(part ? _mm256_srli_epi16(b, 4) : b, bits);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256i x = four_inputs(inputs + r * stride + 4 * j + 16 * part);
                low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(c, x));
                high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(d, x));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        dots[r] = {_mm256_madd_epi16(low[r], one), _mm256_madd_epi16(high[r], one)};
}

// For 8 outputs.
template <int R>
INLINE void int8_dots(const uint8_t* values, const int8_t* inputs, long stride, __m256i* dots) {
    const __m256i bits = _mm256_set1_epi8(15);
    __m256i lower[R], upper[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) lower[r] = upper[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int j = 0; j < 8; j++) {
        const __m256i both = load_bytes(values + 64 * j);
        const __m256i low = _mm256_and_si256(both, bits);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), bits);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256i x = four_inputs(inputs + r * stride + 4 * j);
            lower[r] = _mm256_add_epi16(lower[r], _mm256_maddubs_epi16(low, x));
            upper[r] = _mm256_add_epi16(upper[r], _mm256_maddubs_epi16(high, x));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        dots[r] = _mm256_add_epi32(_mm256_madd_epi16(lower[r], _mm256_set1_epi16(1)),
                                   _mm256_madd_epi16(upper[r], _mm256_set1_epi16(16)));
}

template <int R, bool IS_INT4, typename Start, typename Use>
INLINE void for_each_dot(const uint8_t* values, const int8_t* inputs, long stride, Start start, Use use) {
    Ints dots[R];
    if (IS_INT4) {
        int4_dots<R>(values, inputs, stride, dots);
    } else {
        __m256i low[R], high[R];
        int8_dots<R>(values, inputs, stride, low);
        int8_dots<R>(values + 32, inputs, stride, high);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dots[r] = add_ints({low[r], high[r]}, splat_int(start(r)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) use(r, dots[r]);
}
