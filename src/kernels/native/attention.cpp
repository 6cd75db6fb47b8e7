// Attention over a paged cache in float32: two passes over the keys of a row, by 16 positions.
//
// Positions are counted from 0, so that a lane always holds the same ones; what a query must not see
// has probability 0, which adds an exact zero. A query's bits depend on its own row alone.
#include "common.h"

constexpr int MOST_QUERIES = 8;  // of a tile, which read a key once

struct Step {
    const float *query, *k_cache, *v_cache, *sinks;
    const int32_t *starts, *contexts, *tables;
    long table_width, block_size, q_heads, kv_heads, dim, value_dim, window;
    float scale, softcap;
    float* out;
};

// Consecutive queries of one row that share a KV head: number i is head i % group of the row's
// query i / group.
struct Tile {
    int32_t row, kv_head, first, count;
};

struct Scratch {
    float* scores = nullptr;
    long size = 0;
    float* of(long wanted) {
        if (wanted > size) {
            free(scores);
            scores = (float*)aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64);
            size = wanted;
        }
        return scores;
    }
    ~Scratch() { free(scores); }
};

// The sums of the lanes of 16 vectors, each in its lane. Every lane is added in the same order.
static inline __m512 sums_of(const __m512* rows) {
    __m512 quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 *r = rows + 4 * i;
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

static inline __m512 hyperbolic_tangent(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), twice = exponential(_mm512_add_ps(x, x));
    const __m512 y = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(twice, one)));
    return y;
}

// DIM: of keys and values, a multiple of 16; 0 reads it off the step.
template <int DIM>
static void attend_tile(const Step& s, const Tile& tile, Scratch& scratch) {
    const long dim = DIM ? DIM : s.dim, value_dim = DIM ? DIM : s.value_dim;
    const long group = s.q_heads / s.kv_heads;
    const long num_queries = s.starts[tile.row + 1] - s.starts[tile.row];
    const long context = s.contexts[tile.row], before = context - num_queries;
    const int32_t* table = s.tables + tile.row * s.table_width;
    const float* queries[MOST_QUERIES];
    long heads[MOST_QUERIES], places[MOST_QUERIES];  // the last position each query sees
    float* outs[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) {
        const long number = tile.first + i, query = number / group;
        heads[i] = tile.kv_head * group + number % group;
        const long token = (s.starts[tile.row] + query) * s.q_heads + heads[i];
        queries[i] = s.query + token * dim;
        outs[i] = s.out + token * value_dim;
        places[i] = before + query;
    }
    const long begin = s.window && places[0] >= s.window ? places[0] - s.window + 1 : 0;
    const long first = begin / LANES * LANES, end = places[tile.count - 1] + 1;
    const long width = (end - first + LANES - 1) / LANES * LANES;
    float* scores = scratch.of(MOST_QUERIES * width);
    auto slot_of = [&](long position) {
        return (long)table[position / s.block_size] * s.block_size + position % s.block_size;
    };

    __m512 most[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) most[i] = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long at = first; at < end; at += LANES) {
        const float* keys[LANES];
        for (long j = 0; j < LANES; j++) {
            const long position = at + j < begin ? begin : at + j < end ? at + j : end - 1;
            keys[j] = s.k_cache + (slot_of(position) * s.kv_heads + tile.kv_head) * dim;
        }
        for (long i = 0; i < tile.count; i++) {
            __m512 parts[LANES];
#pragma GCC unroll 16
            for (long j = 0; j < LANES; j++) {
                __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(queries[i]), _mm512_loadu_ps(keys[j]));
#pragma GCC unroll 8
                for (long d = LANES; d < dim; d += LANES)
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(queries[i] + d), _mm512_loadu_ps(keys[j] + d), sum);
                parts[j] = sum;
            }
            __m512 score = _mm512_mul_ps(sums_of(parts), _mm512_set1_ps(s.scale));
            if (s.softcap != 0.0f) {
                const __m512 cap = _mm512_set1_ps(s.softcap);
                score = _mm512_mul_ps(hyperbolic_tangent(_mm512_div_ps(score, cap)), cap);
            }
            const __m512i position = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)at));
            __mmask16 seen = _mm512_cmple_epi32_mask(position, _mm512_set1_epi32((int)places[i]));
            if (s.window)
                seen &= _mm512_cmpgt_epi32_mask(position, _mm512_set1_epi32((int)(places[i] - s.window)));
            score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score);
            _mm512_store_ps(scores + i * width + at - first, score);
            most[i] = _mm512_max_ps(most[i], score);
        }
    }

    float totals[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) {
        float highest = _mm512_reduce_max_ps(most[i]);
        if (s.sinks && s.sinks[heads[i]] > highest) highest = s.sinks[heads[i]];
        __m512 total = _mm512_setzero_ps();
        for (long at = 0; at < width; at += LANES) {
            float* place = scores + i * width + at;
            const __m512 score = _mm512_load_ps(place);
            const __mmask16 seen = _mm512_cmpneq_ps_mask(score, _mm512_set1_ps(-INFINITY));
            const __m512 share = _mm512_maskz_mov_ps(
                seen, exponential(_mm512_sub_ps(score, _mm512_set1_ps(highest))));
            _mm512_store_ps(place, share);
            total = _mm512_add_ps(total, share);
        }
        totals[i] = sum_of(total);
        if (s.sinks) {
            const __m512 sink = exponential(_mm512_set1_ps(s.sinks[heads[i]] - highest));
            totals[i] += _mm512_cvtss_f32(sink);
        }
    }

    // By 64 elements of the values, two queries at a time: eight sums at once.
    for (long d = 0; d < value_dim; d += 4 * LANES) {
        const long chunks = value_dim - d < 4 * LANES ? (value_dim - d) / LANES : 4;
        for (long i = 0; i < tile.count; i += 2) {
            const long j = i + 1 < tile.count ? i + 1 : i;
            __m512 a[4], b[4];
            for (int c = 0; c < 4; c++) a[c] = b[c] = _mm512_setzero_ps();
            const float *p = scores + i * width - first, *q = scores + j * width - first;
            for (long at = begin; at < end; at++) {
                const float* value =
                    s.v_cache + (slot_of(at) * s.kv_heads + tile.kv_head) * value_dim + d;
                const __m512 left = _mm512_set1_ps(p[at]), right = _mm512_set1_ps(q[at]);
                if (chunks == 4) {
#pragma GCC unroll 4
                    for (int c = 0; c < 4; c++) {
                        const __m512 v = _mm512_loadu_ps(value + c * LANES);
                        a[c] = _mm512_fmadd_ps(left, v, a[c]);
                        b[c] = _mm512_fmadd_ps(right, v, b[c]);
                    }
                } else {
                    for (int c = 0; c < chunks; c++) {
                        const __m512 v = _mm512_loadu_ps(value + c * LANES);
                        a[c] = _mm512_fmadd_ps(left, v, a[c]);
                        b[c] = _mm512_fmadd_ps(right, v, b[c]);
                    }
                }
            }
            for (int c = 0; c < chunks; c++) {
                const long place = d + c * LANES;
                _mm512_storeu_ps(outs[i] + place, _mm512_div_ps(a[c], _mm512_set1_ps(totals[i])));
                _mm512_storeu_ps(outs[j] + place, _mm512_div_ps(b[c], _mm512_set1_ps(totals[j])));
            }
        }
    }
}

// out [T, Hq, Dv]: attention of query [T, Hq, D] over caches [.., Hkv, D] and [.., Hkv, Dv]; D and Dv
// are multiples of 16. Tokens from starts[B] on are padding and get zeros.
EXPORT void attention(const float* query, const float* k_cache, const float* v_cache,
                      const int32_t* starts, const int32_t* contexts, const int32_t* tables,
                      const float* sinks, long num_tokens, long num_rows, long table_width,
                      long block_size, long q_heads, long kv_heads, long dim, long value_dim,
                      long window, float scale, float softcap, float* out, int num_threads) {
    const Step step = {query,      k_cache, v_cache,  sinks, starts,    contexts, tables, table_width,
                       block_size, q_heads, kv_heads, dim,   value_dim, window,   scale,  softcap,
                       out};
    const long real = starts[num_rows], group = step.q_heads / step.kv_heads;
    memset(out + real * step.q_heads * step.value_dim, 0,
           (num_tokens - real) * step.q_heads * step.value_dim * sizeof(float));
    long tile_size = MOST_QUERIES, num_tiles = 0;
    auto count_tiles = [&] {
        num_tiles = 0;
        for (long row = 0; row < num_rows; row++)
            num_tiles += ((starts[row + 1] - starts[row]) * group + tile_size - 1) / tile_size;
        return num_tiles * step.kv_heads;
    };
    // Few tiles, as of a decode of one row, would leave threads without work.
    if (count_tiles() < 4 * num_threads) {
        tile_size = 1;
        count_tiles();
    }
    Tile* tiles = (Tile*)malloc((num_tiles * step.kv_heads + 1) * sizeof(Tile));
    long count = 0;
    for (long row = 0; row < num_rows; row++) {
        const long queries = (starts[row + 1] - starts[row]) * group;
        // The last ones see most: first.
        for (long first = (queries - 1) / tile_size * tile_size; queries && first >= 0; first -= tile_size)
            for (long head = 0; head < step.kv_heads; head++)
                tiles[count++] = {(int32_t)row, (int32_t)head, (int32_t)first,
                                  (int32_t)(queries - first < tile_size ? queries - first : tile_size)};
    }
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < count; i++) {
            if (step.dim == 64 && step.value_dim == 64)
                attend_tile<64>(step, tiles[i], scratch);
            else if (step.dim == 128 && step.value_dim == 128)
                attend_tile<128>(step, tiles[i], scratch);
            else
                attend_tile<0>(step, tiles[i], scratch);
        }
    }
    free(tiles);
}
