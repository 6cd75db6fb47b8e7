"""Declared parameters: their form, all that follows from it, and names of other engines.

``declare`` has the form of a declaration, ``checks`` the limits of values, ``foreign`` the names
that engine arguments have in vLLM and nano-vllm. The declarations themselves are the fields of
``engine.config.EngineConfig`` and ``engine.sampling_params.SamplingParams``.
"""
