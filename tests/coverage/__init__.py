"""The coverage sweep: which causal language models of transformers the engine serves exactly.

Each entry of transformers' mapping is built tiny with random weights and compared with `generate`.
The sweep also records which models are refused, and why.
"""
