"""Chat: messages and tools to a prompt, and an answer to content, reasoning and tool calls.

Read in this order: ``messages`` (what callers give, checked), ``tool_choice`` (a call forced by
structured output), ``answer_text`` (tokens to text, special tokens marked), ``formats`` (how a
model writes its answers: ``response_template`` of transformers), ``regions`` (its parser, read with
positions), ``deltas`` and ``response`` (the reader of one answer), ``reader`` (all of it for one
model).

No torch here, and transformers only where an answer is read. Imports plain data and the detokenizer
of ``engine``. Imported by ``llm`` and what stands above it.
"""
