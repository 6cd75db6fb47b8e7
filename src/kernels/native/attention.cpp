// Attention over a paged cache in float32: two passes over the keys of a row, 16 positions at a time.
//
// Positions are counted from 0, so a lane always has the same ones. Positions that a query must not
// see have probability 0, which adds an exact zero. A query's bits depend only on its own row.
#include "common.h"

constexpr int MOST_QUERIES = 8;  // per tile, which reads a key once
constexpr int MOST_CHUNKS = VECTOR_REGISTERS == 32 ? 4 : 2;  // vectors of values with sums in registers

struct Step {
    const float *query, *k_cache, *v_cache, *sinks;
    const int32_t *starts, *contexts, *tables, *table_rows;
    long table_width, block_size, q_heads, kv_heads, dim, value_dim, window;
    float scale, softcap;
    float* out;
};

// Consecutive queries of one row that share a KV head: number i is head i % group of the row's
// query i / group.
struct Tile {
    int32_t row, kv_head, first, count;
};

// Memory of a thread, which grows on demand.
template <typename T>
struct Scratch {
    T* values = nullptr;
    long size = 0;
    T* of(long wanted) {
        if (wanted > size) {
            free(values);
            values = (T*)aligned_alloc(64, (wanted * sizeof(T) + 63) / 64 * 64);
            size = wanted;
        }
        return values;
    }
    ~Scratch() { free(values); }
};

// Slots of the positions from begin on: slots[position - begin]. Computed per block, because a
// division per position would take as long as the rest of its arithmetic.
static void find_slots(const int32_t* table, long block_size, long begin, long end, long* slots) {
    long block = begin / block_size, inside = begin % block_size;
    for (long at = begin; at < end; block++, inside = 0) {
        const long base = (long)table[block] * block_size;
        for (; inside < block_size && at < end; inside++, at++) *slots++ = base + inside;
    }
}

// The number of remaining vectors that are summed at once.
static inline long chunks_of(long rest) { return rest < 0 ? 0 : rest < MOST_CHUNKS ? rest : MOST_CHUNKS; }

static inline Floats hyperbolic_tangent(Floats x) {
    const Floats one = splat(1.0f), twice = exponential(x + x);
    return one - splat(2.0f) / (twice + one);
}

// Sums over the slots: a, of p times A vectors of each slot's values; b, of q times B vectors of the
// values at other.
template <int A, int B>
static inline void weigh(const float* p, const float* q, const long* slots, long count, long stride,
                         const float* values, const float* other, Floats* a, Floats* b) {
    Floats left[A], right[B + 1];
    for (int c = 0; c < A; c++) left[c] = zeros();
    for (int c = 0; c < B; c++) right[c] = zeros();
    for (long i = 0; i < count; i++) {
        const long place = slots[i] * stride;
#pragma GCC unroll 4
        for (int c = 0; c < A; c++)
            left[c] = multiply_add(splat(p[i]), load(values + place + c * LANES), left[c]);
#pragma GCC unroll 4
        for (int c = 0; c < B; c++)
            right[c] = multiply_add(splat(q[i]), load(other + place + c * LANES), right[c]);
    }
    for (int c = 0; c < A; c++) a[c] = left[c];
    for (int c = 0; c < B; c++) b[c] = right[c];
}

// DIM: of keys and values, a multiple of 16; 0 reads it from the step.
template <int DIM>
static void attend_tile(const Step& s, const Tile& tile, Scratch<float>& of_scores,
                        Scratch<long>& of_slots) {
    const long dim = DIM ? DIM : s.dim, value_dim = DIM ? DIM : s.value_dim;
    const long group = s.q_heads / s.kv_heads;
    const long num_queries = s.starts[tile.row + 1] - s.starts[tile.row];
    const long context = s.contexts[tile.row], before = context - num_queries;
    const int32_t* table = s.tables + s.table_rows[tile.row] * s.table_width;
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
    float* scores = of_scores.of(MOST_QUERIES * width);
    long* slots = of_slots.of(end - begin);
    find_slots(table, s.block_size, begin, end, slots);

    Floats most[MOST_QUERIES];
    for (long i = 0; i < tile.count; i++) most[i] = splat(-INFINITY);
    for (long at = first; at < end; at += LANES) {
        const float* keys[LANES];
        for (long j = 0; j < LANES; j++) {
            const long position = at + j < begin ? begin : at + j < end ? at + j : end - 1;
            keys[j] = s.k_cache + (slots[position - begin] * s.kv_heads + tile.kv_head) * dim;
        }
        for (long i = 0; i < tile.count; i++) {
            const float* query = queries[i];
            auto products = [&](long j) __attribute__((always_inline)) {
                Floats sum = load(query) * load(keys[j]);
#pragma GCC unroll 8
                for (long d = LANES; d < dim; d += LANES)
                    sum = multiply_add(load(query + d), load(keys[j] + d), sum);
                return sum;
            };
            Floats score = sums_of(products) * splat(s.scale);
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

    // Some vectors of the values for two queries at a time, or twice as many for one query: eight or
    // four sums at once.
    for (long i = 0; i < tile.count; i += 2) {
        const bool is_pair = i + 1 < tile.count;
        const long j = is_pair ? i + 1 : i, ahead = is_pair ? 0 : MOST_CHUNKS;
        const float *p = scores + i * width + begin - first, *q = p + (j - i) * width;
        for (long d = 0; d < value_dim; d += (MOST_CHUNKS + ahead) * LANES) {
            const long rest = (value_dim - d) / LANES;
            const long of_a = chunks_of(rest), of_b = chunks_of(rest - ahead);
            Floats a[MOST_CHUNKS], b[MOST_CHUNKS];
            const float* values = s.v_cache + tile.kv_head * value_dim + d;
            const float* other = values + ahead * LANES;
            const long stride = s.kv_heads * value_dim, count = end - begin;
            if (of_a == MOST_CHUNKS && of_b == MOST_CHUNKS) {
                weigh<MOST_CHUNKS, MOST_CHUNKS>(p, q, slots, count, stride, values, other, a, b);
            } else if (of_a == MOST_CHUNKS && !of_b) {
                weigh<MOST_CHUNKS, 0>(p, q, slots, count, stride, values, other, a, b);
            } else {
                for (long c = 0; c < of_a; c++)
                    weigh<1, 0>(p, q, slots, count, stride, values + c * LANES, other, a + c, b);
                for (long c = 0; c < of_b; c++)
                    weigh<1, 0>(q, q, slots, count, stride, other + c * LANES, other, b + c, b);
            }
            for (int c = 0; c < of_a; c++)
                store(outs[i] + d + c * LANES, a[c] / splat(totals[i]));
            for (int c = 0; c < of_b; c++)
                store(outs[j] + d + (ahead + c) * LANES, b[c] / splat(totals[j]));
        }
    }
}

// out [T, Hq, Dv]: attention of query [T, Hq, D] over caches [.., Hkv, D] and [.., Hkv, Dv]; D and Dv
// are multiples of 16. Tokens from starts[B] on are padding and get zeros.
EXPORT void attention(const float* query, const float* k_cache, const float* v_cache,
                      const int32_t* starts, const int32_t* contexts, const int32_t* tables,
                      const int32_t* table_rows, const float* sinks, long num_tokens, long num_rows,
                      long table_width, long block_size, long q_heads, long kv_heads, long dim, long value_dim,
                      long window, float scale, float softcap, float* out, int num_threads) {
    const Step step = {query,       k_cache,    v_cache, sinks,    starts, contexts,  tables, table_rows,
                       table_width, block_size, q_heads, kv_heads, dim,    value_dim, window, scale,
                       softcap,     out};
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
    // With few tiles, as in a decode of one row, some threads would have no work.
    if (count_tiles() < 4 * num_threads) {
        tile_size = 1;
        count_tiles();
    }
    Tile* tiles = (Tile*)malloc((num_tiles * step.kv_heads + 1) * sizeof(Tile));
    long count = 0;
    for (long row = 0; row < num_rows; row++) {
        const long queries = (starts[row + 1] - starts[row]) * group;
        // A head's tiles in sequence, so that its keys and values are in the cache for all tiles but
        // the first. The last queries, which see the most, come first.
        for (long head = 0; head < step.kv_heads; head++)
            for (long first = (queries - 1) / tile_size * tile_size; queries && first >= 0; first -= tile_size)
                tiles[count++] = {(int32_t)row, (int32_t)head, (int32_t)first,
                                  (int32_t)(queries - first < tile_size ? queries - first : tile_size)};
    }
#pragma omp parallel num_threads(num_threads)
    {
        static thread_local Scratch<float> scores;
        static thread_local Scratch<long> slots;
#pragma omp for schedule(dynamic)
        for (long i = 0; i < count; i++) {
            if (step.dim == 64 && step.value_dim == 64)
                attend_tile<64>(step, tiles[i], scores, slots);
            else if (step.dim == 128 && step.value_dim == 128)
                attend_tile<128>(step, tiles[i], scores, slots);
            else
                attend_tile<0>(step, tiles[i], scores, slots);
        }
    }
    free(tiles);
}
