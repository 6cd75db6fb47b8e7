"""The commands and programs of the documentation: checked, and run.

``python -m tests.support.doc_commands [FILES]`` runs every block of ``bash`` and ``python`` with
the embedded model and prints a table; ``--check`` runs none, but checks syntax, markers, options
and imports. An HTML comment directly above a block is a marker (``blocks``). Read ``blocks``, then
``check``, then ``run``.
"""
