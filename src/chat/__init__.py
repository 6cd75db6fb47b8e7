"""Chat: messages and tools to a prompt, and an answer to content, reasoning and tool calls.

Read in this order: ``messages`` (the arguments of callers, checked), ``tool_choice`` (a call
forced by structured output), ``answer_text`` (tokens to text, special tokens marked), ``formats``
(the table of formats), ``call_syntax`` and ``values`` (the text of one call), ``regions`` (the
reader of all formats), ``response_template`` (the reader of tokenizers' own response templates),
``template`` (properties of a chat template, and its format), ``deltas`` and ``response`` (the
reader of one answer), ``reader`` (all of it for one model).

No torch here, and transformers only where an answer is read. Imports plain data and the detokenizer
of ``engine``. Imported by ``llm`` and the rooms above it.
"""
