// Vectors of 16 lanes, with AVX512 and VNNI, or with AVX2, FMA and F16C: the same operations per
// lane, and so the same bits.
//
// Floats and Ints have LANES lanes. Operators add, subtract, multiply and divide Floats; both headers
// define the other functions. larger and smaller return their second argument where one is NaN. First
// is a number of lanes from lane 0 on, Mask any set of lanes.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

constexpr long LANES = 16;

#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

// The sum of all lanes: halves, then quarters, then pairs.
INLINE float sum_of(Floats x) {
    const __m256 half = _mm256_add_ps(low_half(x), high_half(x));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// The largest lane, in a fixed order, which determines the result with NaN.
INLINE float largest_of(Floats x) {
    const __m256 half = _mm256_max_ps(high_half(x), low_half(x));
    __m128 quarter = _mm_max_ps(_mm256_extractf128_ps(half, 1), _mm256_castps256_ps128(half));
    quarter = _mm_max_ps(quarter, _mm_shuffle_ps(quarter, quarter, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtss_f32(_mm_max_ps(quarter, _mm_shuffle_ps(quarter, quarter, _MM_SHUFFLE(2, 3, 0, 1))));
}
