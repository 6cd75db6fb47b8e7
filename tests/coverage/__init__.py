"""Which causal language models of transformers are served exactly, and which are refused and why:
each entry of its mapping, tiny and with random weights, beside `generate`."""
