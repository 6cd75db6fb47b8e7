"""Recurrent layers: short convolutions, gated delta rules and state space models over state slots.

Read in this order: ``ops`` (the custom ops, with all shapes and the rule of the slots), ``walk``
(which rows read and write which slots, and when), ``cpu_short_conv``, ``cpu_linear_state`` (the
delta rule and Mamba-2, whose states are matrices of keys and values), ``cpu_selective_scan``
(Mamba-1); then ``short_conv``, ``linear_state`` and ``selective_scan``, the same as Triton kernels,
with ``device_functions``.
"""
