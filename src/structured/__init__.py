"""Structured output: the tokens that a JSON schema, a regex or a grammar allows next.

Reading order: ``tokens`` (converts a tokenizer for llguidance), ``grammars`` (compiles constraints
for one model and caches them), ``texts`` (the state of each running request), ``matchers``
(their bitmasks, from plans and results only), ``forced`` (draft tokens that grammars force). The
package imports no torch: it computes bitmasks, which the sampler applies.

It imports the plans, constraints and drafters of ``engine``; ``runner`` and ``build`` import it.
"""
