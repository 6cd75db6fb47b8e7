"""Paged attention with the same bits for decode, extend and prefill.

Read in this order: ``backend`` (which implementation serves a model), ``reference`` with
``reference_layout`` (plain torch), ``cpu_invariant`` (a CPU's); then Triton's: ``launch`` (host
side), ``online_softmax`` (the shared arithmetic and bundles of arguments), ``e4m3_tiles`` (tiles of
either kind of cache), ``decode`` with ``decode_prologue`` and ``combine`` (the store of outputs,
too), ``prefill``, ``tiling``;
``prefill_sm90`` with its ``_producer`` and ``_consumer`` in Gluon for Hopper; ``flash`` (the
FlashAttention libraries); ``triton_backend`` (the state of an engine); ``spec`` (the static
parameters of one call). Of indexers: ``indexer`` on a CPU, ``index_kernels`` on a GPU, and
``chosen`` (attention to the chosen positions).

May be imported by ``ops``, ``compile`` and ``runner``.
"""
