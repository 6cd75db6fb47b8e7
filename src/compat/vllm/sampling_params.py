"""vLLM's module of sampling parameters."""

from pagespec.compat.refused import attribute
from pagespec.engine.beam_search import BeamSearchParams
from pagespec.engine.sampling_params import RequestOutputKind, SamplingParams
from pagespec.engine.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
