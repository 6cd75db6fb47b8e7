"""Declared parameters: their declaration, everything derived from it, and names of other engines.

``declare`` defines the form of a declaration, ``checks`` the limits of values, ``foreign`` the
names of engine arguments in vLLM and nano-vllm. The declarations themselves are the fields of
``engine.config.EngineConfig`` and ``engine.sampling_params.SamplingParams``.
"""
