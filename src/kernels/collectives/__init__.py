"""Collectives of a tensor-parallel group: every element is summed in rank order, in float32.

Read in this order: ``communicator`` (the interface, and the one of the scope), ``gloo`` (over
``torch.distributed``, on a CPU).
Imports torch alone. Imported by ``kernels.ops`` and all above.
"""
