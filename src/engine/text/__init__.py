"""Conversion of tokens to text, without a model.

Reading order: ``detokenizer`` (incremental text, and stop strings), ``text_bounds`` and
``text_offsets`` (lengths and positions of tokens in a text), ``token_bytes`` (the bytes of a
token), ``delimiter`` and ``reasoning`` (the end of reasoning).
"""
