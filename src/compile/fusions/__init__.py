"""Passes that make one call, of a kernel of ours, out of several operations.

Read ``fuse_activation`` first, the shortest rule; then ``fuse_norm``, whose pattern of RMSNorm
others contain; ``joined_norms`` and ``quantized_rows``; the rotary rules; those of experts
(``combine_experts`` and on); ``sort_rows``, which gives attention one argument more. A match states
that known nodes compute a known function of known sources; a value that is read elsewhere too
stays.

Imports ``compile.lowering``, ``compile.fx`` and ``kernels``. Imported by ``compile.passes``.
"""
