// Shared by all sources: the exponential, and the size from which threads are used.
//
// Every function computes the same bits for a row whatever the other rows are. One fixed sequence of
// operations computes an element: fused multiply-adds are explicit, and the compiler may add none.
// Threads share rows or columns, never a sum. Bits are the same on every processor.
#pragma once

#include "vectors.h"

constexpr long ROW_GRAIN = 1 << 14;  // with fewer elements, one thread computes all

#define EXPORT extern "C" __attribute__((visibility("default")))

INLINE Floats exponential(Floats x) {
    // 2^n * exp(r) with |r| <= log(2) / 2; a polynomial of degree 6 for exp(r).
    x = larger(splat(-150.0f), smaller(splat(130.0f), x));
    const Floats n = round_to_even(x * splat(1.44269504088896341f));
    Floats r = subtract_product(x, n, splat(0.693359375f));
    r = subtract_product(r, n, splat(-2.12194440e-4f));
    Floats p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r + splat(1.0f));
    return times_power(p, n);
}
