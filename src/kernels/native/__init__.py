"""CPU kernels in C++ for models that stay quantised, compiled on the machine that runs them.

Files, in reading order: ``library`` (compiles the sources once, keeps the result, loads it),
``calls`` (its functions on tensors), ``vectors.h`` (16 lanes, with AVX512 or AVX2), the sources
``common.h``, ``linear.cpp``, ``attention.cpp`` and ``rowwise.cpp``, then ``replay`` and
``replay.cpp`` (recorded and repeated calls). Without a C++ compiler, or a processor that has AVX2
with FMA and F16C, a graph is lowered to torch operations.

Imports ``arguments``. ``matmul`` and ``compile`` import this package.
"""
