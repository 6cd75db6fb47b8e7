"""Linear layers on a CPU: matmuls of MKL and oneDNN, called so that they are batch-invariant.

Read in this order: ``invariant`` (``F.linear`` and experts: which library, and what it is given),
``products`` (other matmuls with a constant, such as ``bmm`` and ``einsum``), ``recipe_cache``
(results of trials, kept on disk), ``few_rows`` (the quickest way, whose bits follow the number of
rows); of quantised weights ``quantized`` (matmuls with 4 and 8 bits) and ``expanded`` (matmuls that
expand some outputs at a time).
"""
