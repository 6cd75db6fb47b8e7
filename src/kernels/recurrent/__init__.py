"""Recurrent layers: short convolutions, gated delta rules and state space models over state slots.

Read in this order: ``ops`` (the custom ops, with all shapes and the rule of the slots), ``walk``
(which rows read and write which slots, and when), ``cpu_short_conv``, ``cpu_linear_state`` (the
delta rule and Mamba-2, whose states are matrices of keys and values), ``cpu_selective_scan``
(Mamba-1); then as Triton kernels ``short_conv``, ``selective_scan``, ``walked_delta_rule`` (decays
per channel), with ``device_functions``, and ``chunked`` (the other delta rules and Mamba-2), with
``chunk_layout`` (their slots), ``chunk_inner``, ``chunk_prompt``, ``chunk_decode`` and
``chunk_functions``.
"""
