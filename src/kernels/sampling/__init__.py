"""Sampling: tokens from logits, the same for a row whatever the batch.

Read in this order: ``sampler`` (how a token is chosen, in torch, and random numbers by counter),
``gumbel`` (greedy and temperature sampling as kernels) with ``draw_functions`` (device functions
of all samplers), ``top_k_top_p`` and ``top_k_top_p_threshold`` (truncated sampling without a
sort), ``edit_logits`` and ``edit_kernels`` (penalties, bias, masks and bad words, before any of
that). ``logprob_rows`` has the formula of a log-probability, ``logprobs`` computes it in kernels.

May be imported by ``runner`` and ``compile``.
"""
