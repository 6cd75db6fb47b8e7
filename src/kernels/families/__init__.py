"""A module per generation of hardware, whose ``IMPLEMENTATIONS`` :mod:`..registry` reads."""
