// Operations on rows of float32: RMSNorm, gated activations, rotation with KV store.
#include "common.h"

// out = x * rsqrt(mean(x^2) + eps) * (weight + shift), over count elements.
static void norm_row(const float* x, const float* weight, float shift, float eps, long count,
                     float* out) {
    Floats squares = zeros();
    for (long i = 0; i < count; i += LANES) {
        const Floats a = load(x + i, first_lanes(count - i));
        squares = multiply_add(a, a, squares);
    }
    const Floats factor = splat(1.0f / sqrtf(sum_of(squares) / (float)count + eps));
    for (long i = 0; i < count; i += LANES) {
        const First lanes = first_lanes(count - i);
        const Floats w = load(weight + i, lanes) + splat(shift);
        const Floats y = load(x + i, lanes) * factor;
        store(out + i, w * y, lanes);
    }
}

// normed = RMSNorm(x), all [M, N]; with a residual, hidden = residual + x and normed = RMSNorm(hidden).
EXPORT void rms_norm(const float* x, const float* residual, const float* weight, float shift, float eps,
                     long num_rows, long width, float* hidden, float* normed, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * width > ROW_GRAIN)
    for (long row = 0; row < num_rows; row++) {
        const float* source = x + row * width;
        if (residual) {
            float* sums = hidden + row * width;
            for (long i = 0; i < width; i += LANES) {
                const First lanes = first_lanes(width - i);
                const Floats a = load(residual + row * width + i, lanes);
                const Floats b = load(source + i, lanes);
                store(sums + i, a + b, lanes);
            }
            source = sums;
        }
        norm_row(source, weight, shift, eps, width, normed + row * width);
    }
}

// out [M, N] = activation(gate) * up: silu, or gelu with tanh, which is silu(2 u) with a cubic u.
EXPORT void gated_activation(const float* gate, long gate_stride, const float* up, long up_stride,
                             int is_gelu, long num_rows, long width, float* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * width > ROW_GRAIN)
    for (long row = 0; row < num_rows; row++) {
        for (long i = 0; i < width; i += LANES) {
            const First lanes = first_lanes(width - i);
            const Floats x = load(gate + row * gate_stride + i, lanes);
            const Floats one = splat(1.0f);
            Floats inner = x;
            if (is_gelu) {  // 2 * sqrt(2 / pi) * (x + 0.044715 x^3)
                const Floats cube = x * x * x;
                inner = multiply_add(splat(0.044715f), cube, x);
                inner = inner * splat(1.5957691216057308f);
            }
            const Floats down = exponential(zeros() - inner);
            const Floats active = x / (one + down);
            const Floats other = load(up + row * up_stride + i, lanes);
            store(out + row * width + i, active * other, lanes);
        }
    }
}

struct Heads {
    const float* data;  // [T, heads, dim], strided in tokens and heads
    long token_stride, head_stride, heads;
};

// One head: its norm, if there is a weight, then x * cos + swapped halves * sin in the first
// rotary_dim elements. half: 0, or rotary_dim / 2 if the table has both halves.
static void rotate_head(const float* x, const float* cos, const float* sin, long rotary_dim, long half,
                        long dim, const float* weight, float shift, float eps, float* out) {
    if (weight) {
        norm_row(x, weight, shift, eps, dim, out);
        x = out;
    }
    const long middle = rotary_dim / 2;
    for (long i = 0; i < middle; i += LANES) {
        const First lanes = first_lanes(middle - i);
        const Floats first = load(x + i, lanes);
        const Floats second = load(x + middle + i, lanes);
        const Floats a = second * load(sin + i, lanes);
        const Floats b = first * load(sin + half + i, lanes);
        const Floats left = multiply_subtract(first, load(cos + i, lanes), a);
        const Floats right = multiply_add(second, load(cos + half + i, lanes), b);
        store(out + i, left, lanes);
        store(out + middle + i, right, lanes);
    }
    if (x != out) memcpy(out + rotary_dim, x + rotary_dim, (dim - rotary_dim) * sizeof(float));
}

// Store queries [T, Hq, D] to rotated, and keys and values to their slots of the caches.
EXPORT void rope_store(const float* query, const float* key, const float* value, long q_token_stride,
                       long q_head_stride, long k_token_stride, long k_head_stride,
                       long v_token_stride, long v_head_stride, const float* cos, const float* sin, long table_width, long rotary_dim,
                       const float* q_weight, const float* k_weight, float shift, float eps,
                       const int64_t* slots, long num_tokens, long q_heads, long kv_heads, long dim,
                       long value_dim, float* rotated, float* k_cache, float* v_cache,
                       int num_threads) {
    const Heads q = {query, q_token_stride, q_head_stride, q_heads};
    const Heads k = {key, k_token_stride, k_head_stride, kv_heads};
    const Heads v = {value, v_token_stride, v_head_stride, kv_heads};
    const long half = table_width == rotary_dim ? rotary_dim / 2 : 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    if (num_tokens * (q_heads + kv_heads) * dim > ROW_GRAIN)
    for (long t = 0; t < num_tokens; t++) {
        const float *c = cos + t * table_width, *s = sin + t * table_width;
        for (long h = 0; h < q.heads; h++)
            rotate_head(q.data + t * q.token_stride + h * q.head_stride, c, s, rotary_dim, half, dim,
                        q_weight, shift, eps, rotated + (t * q.heads + h) * dim);
        for (long h = 0; h < k.heads; h++) {
            const long place = slots[t] * k.heads + h;
            rotate_head(k.data + t * k.token_stride + h * k.head_stride, c, s, rotary_dim, half, dim,
                        k_weight, shift, eps, k_cache + place * dim);
            memcpy(v_cache + place * value_dim, v.data + t * v.token_stride + h * v.head_stride,
                   value_dim * sizeof(float));
        }
    }
}
