"""Collectives of a tensor-parallel group: every element is summed in rank order, in float32.

Read in this order: ``communicator`` (the interface, and which one the ops call), ``gloo`` (over
``torch.distributed``, on a CPU), ``symmetric`` and its kernels in ``peer_memory`` (over NVLink).

Imports torch, Triton, ``kernels.fused`` and ``kernels.device``. Imported by ``kernels.ops`` and all
above.
"""
