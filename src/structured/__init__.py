"""Structured output: which tokens a JSON schema, a regex or a grammar allows next.

Read in this order: ``tokens`` (a tokenizer, as llguidance reads it), ``grammars`` (a constraint,
compiled for one model and kept), ``matchers`` (how far each running request has come, from plans
and results alone). No torch here: the masks are bits, for the sampler to apply.

Imports the plans and constraints of ``engine``. Imported by ``runner`` and ``build``.
"""
