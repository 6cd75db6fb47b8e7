"""Recurrent layers: short convolutions, gated delta rules and state space models over state slots.

Modules, in reading order: ``ops`` (the custom ops, with all shapes and the slot rule),
``recurrent_spec`` (a call's static parameters, and the records in slots), ``walk`` (which rows read
and write which slots, and when), ``cpu`` (all recurrences on a CPU). Triton kernels:
``short_conv``, ``walked`` (Mamba-1, and delta rules with decays per channel), ``chunked`` with
``chunk_kernels`` (the other delta rules, and Mamba-2), all with ``device_functions``.
"""
