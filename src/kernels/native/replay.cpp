// Replays recorded calls in order.
#include "common.h"
#include <utility>

extern "C" {
void linear(const float*, long, const int32_t*, long, long, int, const uint8_t*, const uint8_t*,
            const float*, float*, void*, int);
void attention(const float*, const float*, const float*, const int32_t*, const int32_t*, const int32_t*,
               const int32_t*, const float*, long, long, long, long, long, long, long, long, long, float, float, float*,
               int);
void rms_norm(const float*, const float*, const float*, float, float, long, long, float*, float*, int);
void gated_activation(const float*, long, const float*, long, int, long, long, float*, int);
void rope_store(const float*, const float*, const float*, long, long, long, long, long, long,
                const float*, const float*, long, long, const float*, const float*, float, float,
                const int64_t*, long, long, long, long, long, float*, float*, float*, int);
}

struct Call {
    int64_t function;  // index in the list in library.py
    int64_t arguments[30];
};

// Before a replay, an argument of a call becomes values[value] + offset.
struct Change {
    int64_t call, argument, value, offset;
};

// An argument from 64 bits: integers and pointers by value, a float in the lower half.
template <typename T>
static inline T as(int64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

template <typename... T, size_t... I>
static void apply(void (*function)(T...), const int64_t* arguments, std::index_sequence<I...>) {
    function(as<T>(arguments[I])...);
}

template <typename... T>
static void apply(void (*function)(T...), const int64_t* arguments) {
    apply(function, arguments, std::index_sequence_for<T...>());
}

EXPORT void replay(Call* calls, long num_calls, const Change* changes, long num_changes,
                   const int64_t* values) {
    for (long i = 0; i < num_changes; i++) {
        const Change& change = changes[i];
        calls[change.call].arguments[change.argument] = values[change.value] + change.offset;
    }
    for (long i = 0; i < num_calls; i++) {
        const int64_t* arguments = calls[i].arguments;
        switch (calls[i].function) {
            case 0: apply(linear, arguments); break;
            case 1: apply(attention, arguments); break;
            case 2: apply(rms_norm, arguments); break;
            case 3: apply(gated_activation, arguments); break;
            case 4: apply(rope_store, arguments); break;
        }
    }
}
