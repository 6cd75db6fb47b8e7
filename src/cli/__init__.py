"""The command line. Importing it loads neither torch nor transformers; the commands do.

Read in this order: ``main`` (the commands), ``command`` and ``options`` (how a function becomes
one), ``make_llm``; then the commands: ``generate_prompts``, ``generate_file`` with
``jsonl``, ``answer_lines`` and ``replicas``, ``chat``, ``serve``, ``bench``, ``verify``, ``trace``.

Imports everything below; nothing imports it.
"""
