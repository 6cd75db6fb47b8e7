// Matmuls of float32 rows with weights in 4 or 8 bits, by groups of 32 inputs.
//
// A weight is value * scale + minimum (4 bits) or value * scale (8 bits). Rows are rounded to 8 bits
// with a scale for each group; the sum of products of a group is then an integer, exact, and groups
// are added in order, in float32.
#include "common.h"

constexpr long GROUP = 32;
constexpr int MOST_ROWS = 8;  // of a tile: what the registers hold beside 32 unpacked inputs
constexpr long FEW_ROWS = 4;  // rounded by one thread: cheaper than a barrier

enum Format { INT4 = 0, INT4_FLOAT32 = 1, INT8 = 2 };

struct Rows {
    int8_t* values;   // [M, K]
    float* scales;    // [M, K / 32]
    float* minima;    // [M, K / 32]: scale * sum of the values, what a minimum is multiplied with
    int32_t* offsets; // [M, K / 32]: -128 * sum, since the instruction wants weights without a sign
    long width;
    long groups;
};

static void round_row(const float* x, const Rows& rows, long row) {
    for (long g = 0; g < rows.groups; g++) {
        const __m512 a = _mm512_loadu_ps(x + g * GROUP), b = _mm512_loadu_ps(x + g * GROUP + LANES);
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
        float scale = most / 127.0f;
        if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) scale = NAN;
        const __m512 inverse = _mm512_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
        const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
        const __m512i qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
        int8_t* values = rows.values + row * rows.width + g * GROUP;
        _mm_storeu_si128((__m128i*)values, _mm512_cvtsepi32_epi8(qa));
        _mm_storeu_si128((__m128i*)(values + LANES), _mm512_cvtsepi32_epi8(qb));
        const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(qa, qb));
        rows.scales[row * rows.groups + g] = scale;
        rows.minima[row * rows.groups + g] = scale * (float)sum;
        rows.offsets[row * rows.groups + g] = -128 * sum;
    }
}

// 16 outputs of R rows. values: of these outputs, a group after the other: for each four inputs, 16
// outputs of four bytes; of 4-bit weights the low halves are the first 16 inputs. numbers: scales
// [16] (and minima [16]) of each group, float16 or float32.
template <int R, Format FORMAT>
static void multiply_tile(const Rows& rows, long row, const uint8_t* values, const uint8_t* numbers,
                          const float* bias, float* out, long out_stride, __mmask16 mask) {
    __m512 total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
    const __m512i low = _mm512_set1_epi8(15);
    for (long g = 0; g < rows.groups; g++) {
        __m512i weight[8];
        __m512 scale, minimum;
        if (FORMAT == INT8) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) weight[j] = _mm512_load_si512(values + 64 * j);
            values += 512;
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 4; j++) {
                const __m512i both = _mm512_load_si512(values + 64 * j);
                weight[j] = _mm512_and_si512(both, low);
                weight[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
            values += 256;
        }
        if (FORMAT == INT4_FLOAT32) {
            scale = _mm512_loadu_ps(numbers);
            minimum = _mm512_loadu_ps(numbers + 64);
            numbers += 128;
        } else {
            scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)numbers));
            numbers += 32;
            if (FORMAT == INT4) {
                minimum = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)numbers));
                numbers += 32;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const long at = (row + r) * rows.groups + g;
            const int32_t* x = (const int32_t*)(rows.values + (row + r) * rows.width + g * GROUP);
            __m512i dot = FORMAT == INT8 ? _mm512_set1_epi32(rows.offsets[at]) : _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                dot = _mm512_dpbusd_epi32(dot, weight[j], _mm512_set1_epi32(x[j]));
            const __m512 scales = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[at]));
            total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scales, total[r]);
            if (FORMAT != INT8)
                total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(rows.minima[at]), total[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (bias) total[r] = _mm512_add_ps(total[r], _mm512_maskz_loadu_ps(mask, bias));
        _mm512_mask_storeu_ps(out + r * out_stride, mask, total[r]);
    }
}

template <int R, Format FORMAT>
static void multiply_rest(const Rows& rows, long row, long count, const uint8_t* values,
                          const uint8_t* numbers, const float* bias, float* out, long stride,
                          __mmask16 mask) {
    if constexpr (R > 0) {
        if (count == R)
            multiply_tile<R, FORMAT>(rows, row, values, numbers, bias, out, stride, mask);
        else
            multiply_rest<R - 1, FORMAT>(rows, row, count, values, numbers, bias, out, stride, mask);
    }
}

template <Format FORMAT>
static void multiply_block(const Rows& rows, long num_rows, long block, const uint8_t* values,
                           const uint8_t* numbers, const float* bias, float* out, long num_outputs) {
    const long value_bytes = FORMAT == INT8 ? 512 : 256;
    const long number_bytes = FORMAT == INT8 ? 32 : FORMAT == INT4 ? 64 : 128;
    const __mmask16 mask = first_lanes(num_outputs - block * LANES);
    values += block * rows.groups * value_bytes;
    numbers += block * rows.groups * number_bytes;
    out += block * LANES;
    if (bias) bias += block * LANES;
    for (long row = 0; row < num_rows; row += MOST_ROWS) {
        const long count = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        multiply_rest<MOST_ROWS, FORMAT>(rows, row, count, values, numbers, bias,
                                         out + row * num_outputs, num_outputs, mask);
    }
}

// out [M, N] = x [M, K] times the weight [N, K], plus bias [N] if there is one. Rows from *num_real on,
// if that is given, are padding and get zeros. scratch: M * (K + K / 32 * 12) bytes.
EXPORT void linear(const float* x, long num_rows, const int32_t* num_real, long num_inputs,
                   long num_outputs, int format, const uint8_t* values, const uint8_t* numbers,
                   const float* bias, float* out, void* scratch, int num_threads) {
    const long groups = num_inputs / GROUP;
    long real = num_rows;
    if (num_real && *num_real < num_rows) {
        real = *num_real;
        memset(out + real * num_outputs, 0, (num_rows - real) * num_outputs * sizeof(float));
    }
    Rows rows;
    rows.values = (int8_t*)scratch;
    rows.scales = (float*)(rows.values + num_rows * num_inputs);
    rows.minima = rows.scales + num_rows * groups;
    rows.offsets = (int32_t*)(rows.minima + num_rows * groups);
    rows.width = num_inputs;
    rows.groups = groups;
    const long blocks = (num_outputs + LANES - 1) / LANES;
    const bool is_few = real <= FEW_ROWS;
    if (is_few)
        for (long row = 0; row < real; row++) round_row(x + row * num_inputs, rows, row);
#pragma omp parallel num_threads(num_threads)
    {
        if (!is_few) {
#pragma omp for schedule(static)
            for (long row = 0; row < real; row++) round_row(x + row * num_inputs, rows, row);
        }
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) {
            if (format == INT4)
                multiply_block<INT4>(rows, real, block, values, numbers, bias, out, num_outputs);
            else if (format == INT4_FLOAT32)
                multiply_block<INT4_FLOAT32>(rows, real, block, values, numbers, bias, out, num_outputs);
            else
                multiply_block<INT8>(rows, real, block, values, numbers, bias, out, num_outputs);
        }
    }
}
