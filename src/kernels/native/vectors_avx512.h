// Vectors of AVX512: one register of 16 lanes.
#pragma once

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;
using First = __mmask16;

constexpr int VECTOR_REGISTERS = 32;

INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Ints lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
INLINE Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }

INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE First first_lanes(long count) {
    return count >= LANES ? (__mmask16)0xFFFF : (__mmask16)((1u << count) - 1u);
}
// The other lanes are 0, and are not written.
INLINE Floats load(const float* from, First lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
INLINE void store(float* to, Floats x, First lanes) { _mm512_mask_storeu_ps(to, lanes, x); }
INLINE Floats load_float16(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
INLINE Floats subtract_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats absolute(Floats x) { return _mm512_abs_ps(x); }
INLINE Floats round_to_even(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for an integer n, rounded once.
INLINE Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// Rounded to nearest, ties to even; INT_MIN if there is no such integer.
INLINE Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
INLINE void store_int8(int8_t* to, Ints x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(x)); }
INLINE int sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }

INLINE bool has_nan(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
INLINE Mask is_at_most(Ints a, int32_t b) { return _mm512_cmple_epi32_mask(a, splat_int(b)); }
INLINE Mask is_above(Ints a, int32_t b) { return _mm512_cmpgt_epi32_mask(a, splat_int(b)); }
INLINE Mask is_not(Floats a, float b) { return _mm512_cmpneq_ps_mask(a, splat(b)); }
INLINE Mask both(Mask a, Mask b) { return a & b; }
INLINE Floats where(Mask mask, Floats x, Floats other) { return _mm512_mask_mov_ps(other, mask, x); }
INLINE Floats where(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }

INLINE float first_of(Floats x) { return _mm512_cvtss_f32(x); }
INLINE __m256 low_half(Floats x) { return _mm512_castps512_ps256(x); }
INLINE __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x, 1); }

// The sums of the lanes of row(0) to row(15), each in its lane, added in one order.
template <typename Row>
INLINE Floats sums_of(Row row) {
    __m512 quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 r[4] = {row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3)};
        const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpackhi_ps(r[0], r[1]));
        const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(r[2], r[3]), _mm512_unpackhi_ps(r[2], r[3]));
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        // Lane j of each quarter: a part of the sum of row j.
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88),
                                     _mm512_shuffle_f32x4(quads[0], quads[1], 0xDD));
    const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88),
                                      _mm512_shuffle_f32x4(quads[2], quads[3], 0xDD));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
}

// Dot products of a group of 32 inputs with 16 outputs' weights, for R rows: use(r, start(r) + sum of
// weight * input). values: for each four inputs, 16 outputs of four bytes; for 4-bit weights the low
// halves are the first 16 inputs. inputs: those of row r start at r * stride.
template <int R, bool IS_INT4, typename Start, typename Use>
INLINE void for_each_dot(const uint8_t* values, const int8_t* inputs, long stride, Start start, Use use) {
    __m512i weight[8];
    if (IS_INT4) {
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            const __m512i both = _mm512_load_si512(values + 64 * j);
            weight[j] = _mm512_and_si512(both, low);
            weight[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    } else {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) weight[j] = _mm512_load_si512(values + 64 * j);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const int32_t* x = (const int32_t*)(inputs + r * stride);
        __m512i dot = _mm512_set1_epi32(start(r));
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) dot = _mm512_dpbusd_epi32(dot, weight[j], _mm512_set1_epi32(x[j]));
        use(r, dot);
    }
}
