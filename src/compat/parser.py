"""``FlexibleArgumentParser``: argparse, with dashes and underscores as one character in options."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(ArgumentParser):
    """An ``ArgumentParser`` that takes ``--max_model_len`` for ``--max-model-len``, and the
    reverse. vLLM's other extensions (``--config`` files, keys such as ``--json-arg.key``) are
    refused as unknown options."""

    def __init__(self, *given: Any, **named: Any) -> None:
        named.pop("add_json_tip", None)
        super().__init__(*given, **named)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See ``ArgumentParser.parse_known_args``; ``parse_args`` calls it."""
        if args is None:
            import sys

            args = sys.argv[1:]
        end = args.index("--") if "--" in args else len(args)
        return super().parse_known_args([*map(self._spelled, args[:end]), *args[end:]], namespace)

    def _spelled(self, text: str) -> str:
        """An argument with its option spelled as declared."""
        flag, equal, value = text.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return text
        for old, new in ("_-", "-_"):
            other = "--" + flag[2:].replace(old, new)
            if other in self._option_string_actions:
                return other + equal + value
        return text
