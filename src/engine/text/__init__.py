"""Text of tokens, without a model.

Read in this order: ``detokenizer`` (text as tokens come, and stop strings), ``text_bounds`` and
``text_offsets`` (lengths and places of tokens in a text), ``token_bytes`` (the bytes of a token),
``delimiter`` and ``reasoning`` (where reasoning ends).
"""
