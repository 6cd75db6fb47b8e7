"""Compile the regions between kernels with Inductor.

Modules, in reading order: ``regions`` (cuts a graph at its matmuls and kernels; equal regions are
compiled once), then ``compile_region`` (one region).

Imports ``compile.fx``. ``compile.captured_model`` imports this package.
"""
