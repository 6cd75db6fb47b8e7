"""Helpers on FX graphs, with no knowledge of models or passes.

``nodes``: recognise operations, operands, shapes and users. ``fake_tensors``: copy and compare the
layouts of fake tensors without adding guards. ``recorder``: what new calls return.
``rules``: patterns of nodes, their guards and replacements. ``spec``: what
may stand in a graph, for tests. ``stand_in``: parameters without values. ``weights``: where each
tensor of the checkpoint is, as loading and the passes have recorded it.

Imports no other room of ``compile``, which all may import it.
"""
