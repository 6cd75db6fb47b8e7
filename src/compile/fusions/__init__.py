"""Passes that replace several operations by one call of a fused kernel.

Modules, in reading order: ``fuse_activation``, the shortest rule; ``fuse_norm``, whose pattern of
RMSNorm others contain; ``joined_norms`` and ``quantized_rows``; the rotary rules; those of experts
(``combine_experts`` and following); ``sort_rows``, which gives attention one more argument. A match
states that known nodes compute a known function of known sources. A value that is also read
elsewhere stays.

Imports ``compile.lowering``, ``compile.fx`` and ``kernels``. ``compile.passes`` imports this
package.
"""
