"""Chat: converts messages and tools to prompts, and answers to content, reasoning and tool calls.

Reading order: ``messages`` (validates the caller's arguments), ``tool_choice`` (calls forced by
structured output), ``answer_text`` (tokens to text, with special tokens marked), ``formats``
(the table of formats), ``call_syntax`` and ``values`` (the text of one call), ``regions`` (the
reader for all formats), ``response_template`` (the reader for tokenizers' own response templates),
``template`` (properties of a chat template, and its format), ``deltas`` and ``response`` (the
reader of one answer), ``reader`` (everything for one model).

The package imports no torch, and transformers only to read answers. It imports plain data and the
detokenizer of ``engine``. ``llm`` and the packages above it import it.
"""
