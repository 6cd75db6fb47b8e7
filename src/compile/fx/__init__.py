"""Helpers on FX graphs that do not depend on models or passes.

``nodes``: identify operations, operands, shapes and users. ``fake_tensors``: copy and compare the
layouts of fake tensors without adding guards. ``recorder``: results of new calls. ``rules``:
patterns of nodes, their guards and replacements. ``products``: matmuls with a constant.
``pass_context``: the context of a pass. ``check_graph``: what a graph may contain, for tests.

Imports no other package of ``compile``; all of them may import this one.
"""
