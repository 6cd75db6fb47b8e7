"""Linear layers on a CPU: matmuls of MKL and oneDNN, called so that they are batch-invariant.

Modules, in reading order: ``invariant`` (``F.linear`` and experts: which library multiplies, and
which shapes it gets), ``products`` (other matmuls with a constant, such as ``bmm`` and ``einsum``),
``recipe_cache`` (results of trials, kept on disk), ``few_rows`` (the fastest method, whose bits
depend on the number of rows). For quantised weights: ``quantized`` (4-bit and 8-bit matmuls) and
``expanded`` (matmuls that expand some outputs at a time).
"""
