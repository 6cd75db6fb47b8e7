// Attention over a paged cache in float32: two passes over the keys of a row, by 16 positions.
//
// Positions are counted from 0, so that a lane always holds the same ones; what a query must not see
// has probability 0, which adds an exact zero. A query's bits depend on its own row alone.
#include "common.h"

constexpr int MOST_QUERIES = 8;  // of a tile, which read a key once
constexpr int MOST_CHUNKS = VECTOR_REGISTERS == 32 ? 4 : 2;  // vectors of values that sums are kept of

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

static inline Floats hyperbolic_tangent(Floats x) {
    const Floats one = splat(1.0f), twice = exponential(x + x);
    return one - splat(2.0f) / (twice + one);
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

    Floats most[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) most[i] = splat(-INFINITY);
    for (long at = first; at < end; at += LANES) {
        const float* keys[LANES];
        for (long j = 0; j < LANES; j++) {
            const long position = at + j < begin ? begin : at + j < end ? at + j : end - 1;
            keys[j] = s.k_cache + (slot_of(position) * s.kv_heads + tile.kv_head) * dim;
        }
        for (long i = 0; i < tile.count; i++) {
            Floats parts[LANES];
#pragma GCC unroll 16
            for (long j = 0; j < LANES; j++) {
                Floats sum = load(queries[i]) * load(keys[j]);
#pragma GCC unroll 8
                for (long d = LANES; d < dim; d += LANES)
                    sum = multiply_add(load(queries[i] + d), load(keys[j] + d), sum);
                parts[j] = sum;
            }
            Floats score = sums_of(parts) * splat(s.scale);
            if (s.softcap != 0.0f) {
                const Floats cap = splat(s.softcap);
                score = hyperbolic_tangent(score / cap) * cap;
            }
            const Ints position = add_ints(lane_numbers(), splat_int((int)at));
            Mask seen = is_at_most(position, (int)places[i]);
            if (s.window) seen = both(seen, is_above(position, (int)(places[i] - s.window)));
            score = where(seen, score, splat(-INFINITY));
            store(scores + i * width + at - first, score);
            most[i] = larger(most[i], score);
        }
    }

    float totals[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) {
        float highest = largest_of(most[i]);
        if (s.sinks && s.sinks[heads[i]] > highest) highest = s.sinks[heads[i]];
        Floats total = zeros();
        for (long at = 0; at < width; at += LANES) {
            float* place = scores + i * width + at;
            const Floats score = load(place);
            const Floats share = where(is_not(score, -INFINITY), exponential(score - splat(highest)));
            store(place, share);
            total = total + share;
        }
        totals[i] = sum_of(total);
        if (s.sinks) {
            const Floats sink = exponential(splat(s.sinks[heads[i]] - highest));
            totals[i] += first_of(sink);
        }
    }

    // Some vectors of the values, two queries at a time: eight or four sums at once.
    for (long d = 0; d < value_dim; d += MOST_CHUNKS * LANES) {
        const long rest = (value_dim - d) / LANES, chunks = rest < MOST_CHUNKS ? rest : MOST_CHUNKS;
        for (long i = 0; i < tile.count; i += 2) {
            const long j = i + 1 < tile.count ? i + 1 : i;
            Floats a[MOST_CHUNKS], b[MOST_CHUNKS];
            for (int c = 0; c < MOST_CHUNKS; c++) a[c] = b[c] = zeros();
            const float *p = scores + i * width - first, *q = scores + j * width - first;
            for (long at = begin; at < end; at++) {
                const float* value =
                    s.v_cache + (slot_of(at) * s.kv_heads + tile.kv_head) * value_dim + d;
                const Floats left = splat(p[at]), right = splat(q[at]);
                if (chunks == MOST_CHUNKS) {
#pragma GCC unroll 4
                    for (int c = 0; c < MOST_CHUNKS; c++) {
                        const Floats v = load(value + c * LANES);
                        a[c] = multiply_add(left, v, a[c]);
                        b[c] = multiply_add(right, v, b[c]);
                    }
                } else {
                    for (int c = 0; c < chunks; c++) {
                        const Floats v = load(value + c * LANES);
                        a[c] = multiply_add(left, v, a[c]);
                        b[c] = multiply_add(right, v, b[c]);
                    }
                }
            }
            for (int c = 0; c < chunks; c++) {
                const long place = d + c * LANES;
                store(outs[i] + place, a[c] / splat(totals[i]));
                store(outs[j] + place, b[c] / splat(totals[j]));
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
