"""vLLM's module of prompts for measurements; the data sets that need no download."""

from pagespec.compat.datasets import SampleRequest, add_dataset_parser, get_samples

__all__ = ["SampleRequest", "add_dataset_parser", "get_samples"]
