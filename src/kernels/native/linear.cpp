// Matmuls of float32 rows with 4-bit or 8-bit weights, in groups of 32 inputs.
//
// A weight is value * scale + minimum (4 bits) or value * scale (8 bits). Rows are rounded to 8 bits
// with one scale per group. The dot product of a group is then an exact integer. Groups are added in
// order, in float32.
#include "common.h"

constexpr long GROUP = 32;
constexpr int MOST_ROWS = VECTOR_REGISTERS == 32 ? 8 : 4;  // per tile: as many as fit the registers
constexpr long FEW_ROWS = 4;  // one thread rounds them: cheaper than a barrier

enum Format { INT4 = 0, INT4_FLOAT32 = 1, INT8 = 2 };

struct Rows {
    int8_t* values;   // [M, K]
    float* scales;    // [M, K / 32]
    float* minima;    // [M, K / 32]: scale * sum of the values, the factor of a minimum
    int32_t* offsets; // [M, K / 32]: -128 * sum, because the instruction takes unsigned weights
    long width;
    long groups;
};

static void round_row(const float* x, const Rows& rows, long row) {
    for (long g = 0; g < rows.groups; g++) {
        const Floats a = load(x + g * GROUP), b = load(x + g * GROUP + LANES);
        const float most = largest_of(larger(absolute(a), absolute(b)));
        float scale = most / 127.0f;
        if (has_nan(a, b)) scale = NAN;
        const Floats inverse = splat(most > 0.0f ? 127.0f / most : 0.0f);
        const Ints qa = to_ints(a * inverse), qb = to_ints(b * inverse);
        int8_t* values = rows.values + row * rows.width + g * GROUP;
        store_int8(values, qa);
        store_int8(values + LANES, qb);
        const int sum = sum_of(add_ints(qa, qb));
        rows.scales[row * rows.groups + g] = scale;
        rows.minima[row * rows.groups + g] = scale * (float)sum;
        rows.offsets[row * rows.groups + g] = -128 * sum;
    }
}

// 16 outputs of R rows. values: of these outputs, group by group, in the order of for_each_dot.
// numbers: scales [16] (and minima [16]) of each group, float16 or float32.
template <int R, Format FORMAT>
static void multiply_tile(const Rows& rows, long row, const uint8_t* values, const uint8_t* numbers,
                          const float* bias, float* out, long out_stride, First lanes) {
    Floats total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = zeros();
    for (long g = 0; g < rows.groups; g++) {
        Floats scale, minimum = zeros();
        if (FORMAT == INT4_FLOAT32) {
            scale = load((const float*)numbers);
            minimum = load((const float*)numbers + LANES);
            numbers += 128;
        } else {
            scale = load_float16(numbers);
            numbers += 32;
            if (FORMAT == INT4) {
                minimum = load_float16(numbers);
                numbers += 32;
            }
        }
        const long at = row * rows.groups + g;
        for_each_dot<R, FORMAT != INT8>(
            values, rows.values + row * rows.width + g * GROUP, rows.width,
            [&](int r) { return FORMAT == INT8 ? rows.offsets[at + r * rows.groups] : 0; },
            [&](int r, Ints dot) {
                const Floats scales = scale * splat(rows.scales[at + r * rows.groups]);
                total[r] = multiply_add(to_floats(dot), scales, total[r]);
                if (FORMAT != INT8)
                    total[r] = multiply_add(minimum, splat(rows.minima[at + r * rows.groups]), total[r]);
            });
        values += FORMAT == INT8 ? 512 : 256;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (bias) total[r] = total[r] + load(bias, lanes);
        store(out + r * out_stride, total[r], lanes);
    }
}

template <int R, Format FORMAT>
static void multiply_rest(const Rows& rows, long row, long count, const uint8_t* values,
                          const uint8_t* numbers, const float* bias, float* out, long stride,
                          First lanes) {
    if constexpr (R > 0) {
        if (count == R)
            multiply_tile<R, FORMAT>(rows, row, values, numbers, bias, out, stride, lanes);
        else
            multiply_rest<R - 1, FORMAT>(rows, row, count, values, numbers, bias, out, stride, lanes);
    }
}

template <Format FORMAT>
static void multiply_block(const Rows& rows, long num_rows, long block, const uint8_t* values,
                           const uint8_t* numbers, const float* bias, float* out, long num_outputs) {
    const long value_bytes = FORMAT == INT8 ? 512 : 256;
    const long number_bytes = FORMAT == INT8 ? 32 : FORMAT == INT4 ? 64 : 128;
    const First lanes = first_lanes(num_outputs - block * LANES);
    values += block * rows.groups * value_bytes;
    numbers += block * rows.groups * number_bytes;
    out += block * LANES;
    if (bias) bias += block * LANES;
    for (long row = 0; row < num_rows; row += MOST_ROWS) {
        const long count = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        multiply_rest<MOST_ROWS, FORMAT>(rows, row, count, values, numbers, bias,
                                         out + row * num_outputs, num_outputs, lanes);
    }
}

// out [M, N] = x [M, K] times the weight [N, K], plus bias [N] if given. If num_real is given, rows
// from *num_real on are padding and get zeros. scratch: M * (K + K / 32 * 12) bytes.
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
