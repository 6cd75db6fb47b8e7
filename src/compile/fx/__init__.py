"""Helpers on FX graphs that do not depend on models or passes.

``nodes``: identify operations, operands, shapes and users. ``fake_tensors``: copy and compare the
layouts of fake tensors without adding guards. ``recorder``: results of new calls. ``rules``:
patterns of nodes, their guards and replacements. ``check_graph``: what a graph may contain, for
tests. ``stand_in``: parameters without values. ``weights``: the place of each tensor of the
checkpoint, as recorded by loading and the passes.

Imports no other package of ``compile``; all of them may import this one.
"""
