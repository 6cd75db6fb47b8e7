"""Passes that make one call, of a kernel of ours, out of several operations.

Read in this order: ``rms_norm`` and ``latent_pattern`` (recognised, not rewritten), then the
``fuse_*`` passes with ``combine_experts`` in the order of :func:`..passes.gpu_passes`, and
``sort_rows``, which gives attention one argument more. A match states that known nodes compute a
known function of known sources; a value that is read elsewhere too stays.

Imports ``compile.lowering``, ``compile.fx`` and ``kernels``. Imported by ``compile.passes``.
"""
