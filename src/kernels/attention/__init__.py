"""Paged attention that computes the same bits for decode, extend and prefill.

Modules, in reading order: ``backend`` (which implementation serves a model), ``reference`` with
``reference_layout`` (plain torch), ``cpu_invariant`` (batch-invariant, on a CPU). Triton:
``launch`` (host side), ``online_softmax`` (the shared arithmetic and bundles of arguments),
``e4m3_tiles`` (tiles of BF16 or FP8 caches), ``decode`` with ``decode_prologue`` and ``combine``
(which also stores outputs), ``prefill``, ``tiling``. Gluon for Hopper: ``prefill_sm90`` with its
``_producer`` and ``_consumer``. Then ``flash`` (the FlashAttention libraries), ``triton_backend``
(the state of an engine), ``attention_spec`` (the static parameters of one call).

``sparse``, ``mla``, ``ops``, ``compile`` and ``runner`` may import this package.
"""
