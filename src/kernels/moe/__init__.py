"""A mixture of experts on a GPU: each row times the weights of its experts, batch-invariant.

Modules, in reading order, which is the order of a layer: ``route`` (the experts of each token),
``sort_by_expert`` (rows of one expert made contiguous), ``expert_rows`` (rows to their experts, and
their sum, for few tokens with the norm after it), ``grouped_mm`` (the matmul between the two). For
few tokens ``route_rows`` fuses the first three into one launch.

Imports ``matmul`` and ``fused``. ``compile`` may import this package.
"""
