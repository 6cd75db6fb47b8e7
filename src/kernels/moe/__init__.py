"""A mixture of experts on a GPU: each row times the weights of its experts, batch-invariant.

Read in this order, which is that of a layer: ``route`` (which experts a token gets),
``sort_by_expert`` (rows of one expert side by side), ``expert_rows`` (rows to their experts, and
their sum, for few tokens with the norm after it), ``grouped_mm`` (the matmul between the two);
then ``route_rows``, which for few tokens is the first three in one launch.

Imports ``matmul`` and ``fused``. May be imported by ``compile``.
"""
