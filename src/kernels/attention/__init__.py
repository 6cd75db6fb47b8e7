"""Paged attention with the same bits for decode, extend and prefill.

Read in this order: ``backend`` (which implementation serves a model), ``reference`` with
``reference_layout`` (plain torch), ``cpu_invariant`` (a CPU's); then Triton's: ``launch`` (host
side), ``online_softmax`` (the shared arithmetic) and ``bundles`` (its arguments), ``decode`` with
``decode_prologue`` and ``combine``, ``prefill``, ``tiling``; ``prefill_sm90`` with its ``_rows``,
``_loads``, ``_mainloop`` and ``_softmax`` in Gluon for Hopper, and ``_convert`` and ``_e4m3`` for
e4m3 caches; ``flash`` (the FlashAttention libraries); ``triton_backend`` (what an engine keeps);
``spec`` (one call's static parameters). Of indexers: ``indexer`` on a CPU, ``index_launch`` with
``index_kernels`` on a GPU, and ``chosen`` with ``chosen_rows`` (attention to what they choose).

May be imported by ``ops``, ``compile`` and ``runner``.
"""
