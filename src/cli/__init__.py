"""The command line. Importing it loads neither torch nor transformers; running a command does.

Reading order: ``main`` (the commands), ``command`` and ``options`` (turn a function into a
command), ``make_llm``; then the commands: ``generate_prompts``, ``generate_file`` with
``jsonl``, ``answer_lines`` and ``replicas``, ``chat``, ``serve``, ``bench``, ``verify``, ``trace``.

It may import every other package; no package imports it.
"""
