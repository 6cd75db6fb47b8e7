"""Collectives of a tensor-parallel group: every element is summed in rank order, in float32.

Read in this order: ``communicator`` (the interface, and which one the ops call), ``library`` (over
``torch.distributed``: on a CPU, and on GPUs that do not reach each other's memory), ``symmetric``
(over NVLink), the memory it pushes into in ``boxes``, its kernels in ``peer_memory``.

Imports torch, Triton, ``kernels.fused`` and ``kernels.device``. Imported by ``kernels.ops`` and all
above.
"""
