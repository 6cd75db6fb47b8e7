"""Linear layers on a CPU: matmuls of MKL and oneDNN, called so that they are batch-invariant.

Read in this order: ``invariant`` (``F.linear`` and experts: which library, and what it is given),
``products`` (other products with a constant, such as ``bmm`` and ``einsum``), ``recipe_cache``
(what was tried out, kept on disk), ``few_rows`` (the quickest way, whose bits follow the number of
rows).

May be imported by ``quantized`` and ``compile``.
"""
