"""Paged attention with the same bits for decode, extend and prefill.

Read in this order: ``backend`` (which implementation serves a model), ``reference`` with
``reference_layout`` (plain torch), ``cpu_invariant`` (a CPU's); then Triton's: ``launch`` (host
side), ``online_softmax`` (the shared arithmetic and bundles of arguments), ``e4m3_tiles`` (tiles of
either kind of cache), ``decode`` with ``decode_prologue`` and ``combine`` (the store of outputs,
too), ``prefill``, ``tiling``; ``prefill_sm90`` with its ``_producer`` and ``_consumer`` in Gluon
for Hopper; ``flash`` (the FlashAttention libraries); ``triton_backend`` (the state of an engine);
``attention_spec`` (the static parameters of one call).

May be imported by ``sparse``, ``mla``, ``ops``, ``compile`` and ``runner``.
"""
