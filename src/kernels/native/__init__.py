"""CPU kernels in C++, compiled on the machine that runs them, for models that stay quantised.

Read in this order: ``library`` (compiles the sources once, keeps the result, loads it), ``calls``
(its functions over tensors), ``vectors.h`` (16 lanes, over AVX512 or AVX2), the sources
``common.h``, ``linear.cpp``, ``attention.cpp`` and ``rowwise.cpp``, then ``replay`` and
``replay.cpp`` (calls that are recorded and made again). Without a C++ compiler, or a processor
that has AVX2 with FMA and F16C, a graph is lowered to torch's operations.

Imports ``arguments``. Imported by ``matmul`` and ``compile``.
"""
