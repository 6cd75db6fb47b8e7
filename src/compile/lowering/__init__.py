"""Passes that choose a kernel for each matmul, attention call and elementwise operation.

Modules: ``lower_cpu`` with ``invariant_calls`` (operations whose bits must not depend on the
batch), ``lower_gpu`` (with the table of kernels by format), and ``quantize_linear`` for both, where
weights stay quantised.

Imports ``compile.fx`` and ``kernels``. ``compile.fusions`` and ``compile.passes`` import this
package.
"""
