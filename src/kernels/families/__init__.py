"""One module per hardware generation. :mod:`..registry` reads the ``IMPLEMENTATIONS`` of each."""
