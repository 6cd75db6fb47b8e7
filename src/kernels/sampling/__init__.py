"""Sampling: tokens from logits. A row gets the same token in every batch.

Modules, in reading order: ``sampler`` (the selection of a token, in torch, and counter-based random
numbers), ``gumbel`` (greedy and temperature sampling as kernels) with ``draw_functions`` (device
functions of all samplers), ``top_k_top_p`` and ``top_k_top_p_threshold`` (truncated sampling
without a sort), ``edit_logits`` and ``edit_kernels`` (penalties, bias, masks and bad words, applied
first). ``logprob_rows`` has the formula of a log-probability, and ``logprobs`` the kernels for it.

``runner`` and ``compile`` may import this package.
"""
