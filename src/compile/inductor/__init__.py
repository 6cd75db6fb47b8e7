"""Compiles what lies between kernels with Inductor.

Read ``regions`` (cuts a graph at its matmuls and kernels; equal regions are compiled once), then
``compile_region`` (one region).

Imports ``compile.fx``. Imported by ``compile.captured_model``.
"""
