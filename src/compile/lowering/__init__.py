"""Passes that choose a kernel for each matmul, attention call and elementwise operation.

``lower_cpu`` with ``invariant_calls`` (operations whose bits must not follow the batch), and
``lower_gpu`` (with the table of kernels by format); ``quantize_linear`` serves
both, where weights stay quantised.

Imports ``compile.fx`` and ``kernels``. Imported by ``compile.fusions`` and ``compile.passes``.
"""
