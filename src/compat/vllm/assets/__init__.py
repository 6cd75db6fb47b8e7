"""vLLM's package of example images, sounds and videos, which is refused."""

from pagespec.compat.refused import refuse_module

refuse_module(__name__)
