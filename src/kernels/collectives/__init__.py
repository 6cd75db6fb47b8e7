"""Collectives of a tensor-parallel group: every element is summed in rank order, in float32.

Modules, in reading order: ``communicator`` (the interface, and the choice of the communicator that
the ops call), ``library`` (over ``torch.distributed``: on a CPU, and on GPUs without peer access),
``symmetric`` (over NVLink), ``boxes`` (the memory that it pushes into), ``peer_memory`` (its
kernels), ``two_shot`` (those for many rows).

Imports torch, Triton, ``kernels.fused`` and ``kernels.device``. ``kernels.ops`` and the packages
above it import this package.
"""
