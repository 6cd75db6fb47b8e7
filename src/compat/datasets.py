"""Prompts for measurements: the data sets of vLLM's benchmarks that need no download."""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..params.checks import count

_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOKENS = 4, 1024, 2048  # of ShareGPT's conversations
_MAX_TRIES = 10
# By option: the default and the meaning.
_NUMBERS = {
    "num-prompts": (1000, "Number of prompts."),
    "seed": (0, "Seed of the choice of prompts."),
    "random-input-len": (1024, "random: tokens per prompt."),
    "random-output-len": (128, "random: tokens to generate."),
    "random-prefix-len": (0, "random: tokens of a prefix that all prompts share."),
    "custom-output-len": (256, "custom: tokens to generate; -1: output_tokens of the line."),
    "sharegpt-output-len": (None, "sharegpt: tokens to generate, in place of the answer's."),
}


@dataclass
class SampleRequest:
    """A request of a data set.

    Attributes:
        prompt: text, with the chat template applied where the data set says so.
        prompt_len: number of tokens of the prompt.
        expected_output_len: number of tokens to generate.
        multi_modal_data, lora_request: always None.
    """

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: None = None
    lora_request: None = None
    request_id: str | None = None


def add_dataset_parser(parser: ArgumentParser) -> None:
    """Add the options that :func:`get_samples` reads."""
    group = parser.add_argument_group("Data set")
    add = group.add_argument
    add("--dataset-name", default="random", choices=sorted(_DATASETS), help="Source of prompts.")
    add("--dataset-path", help="File of custom (JSON lines) and sharegpt (JSON).")
    add("--disable-shuffle", action="store_true", help="Keep the order of the file.")
    add("--no-oversample", action="store_true", help="Use each prompt of a file once at most.")
    add("--skip-chat-template", action="store_true", help="custom: prompts as they are.")
    for name, (default, text) in _NUMBERS.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=text)


def get_samples(args: Any, tokenizer: Any) -> list[SampleRequest]:
    """The requests that parsed options describe.

    Args:
        args: a namespace with the options of :func:`add_dataset_parser`.
        tokenizer: a tokenizer of transformers.

    Raises:
        InvalidInputError: names the option, the value and the limit.
    """
    if args.dataset_name not in _DATASETS:
        limit = f"must be one of {', '.join(sorted(_DATASETS))}"
        raise InvalidInputError("dataset_name", args.dataset_name, limit)
    count(1)("num_prompts", args.num_prompts)
    chance = random.Random(args.seed)
    found = list(_DATASETS[args.dataset_name](args, tokenizer, chance))
    for index, request in enumerate(found):
        request.request_id = str(index)
    return found


def _random(args: Any, tokenizer: Any, chance: random.Random) -> Iterator[SampleRequest]:
    """Texts of random tokens. A text that is encoded to other tokens may be a few longer."""
    for name, least in {"input": 1, "output": 1, "prefix": 0}.items():
        count(least)(f"random_{name}_len", getattr(args, f"random_{name}_len"))
    special = set(tokenizer.all_special_ids)
    usable = [one for one in range(len(tokenizer)) if one not in special]
    prefix = [chance.choice(usable) for _ in range(args.random_prefix_len)]
    for _ in range(args.num_prompts):
        wanted = len(prefix) + args.random_input_len
        ids = list(prefix)
        # Tokens that are decoded and encoded again may become others.
        for _ in range(_MAX_TRIES):
            ids += [chance.choice(usable) for _ in range(wanted - len(ids))]
            text = tokenizer.decode(ids[:wanted])
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted:
                break
        yield SampleRequest(text, len(ids), args.random_output_len)


def _custom(args: Any, tokenizer: Any, chance: random.Random) -> Iterator[SampleRequest]:
    """Lines ``{"prompt": ..., "output_tokens": ...}``; the prompt is a user's message."""
    given, limit = args.custom_output_len, 'must have "prompt" and, without a length, output_tokens'
    lines = [_read(args, line) for line in _text(args).splitlines() if line.strip()]

    def request(line: Any) -> SampleRequest:
        if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
            raise InvalidInputError("dataset_path", line, limit)
        prompt, number = line["prompt"], given
        if number in (None, -1):
            number = line.get("output_tokens")
        if not isinstance(number, int) or number < 1:
            raise InvalidInputError("dataset_path", line, limit)
        if not args.skip_chat_template:
            message = {"role": "user", "content": prompt}
            prompt = tokenizer.apply_chat_template(
                [message], add_generation_prompt=True, tokenize=False
            )
        return SampleRequest(prompt, _count(tokenizer, prompt), number)

    yield from _chosen(args, chance, lines, request)


def _sharegpt(args: Any, tokenizer: Any, chance: random.Random) -> Iterator[SampleRequest]:
    """The first two turns of conversations; short and long ones are left out."""
    try:
        turns = [one["conversations"] for one in _read(args, _text(args))]
        pairs = [(one[0]["value"], one[1]["value"]) for one in turns if len(one) > 1]
    except (KeyError, TypeError):
        limit = 'must be a list of {"conversations": [{"value": ...}, ...]}'
        raise InvalidInputError("dataset_path", args.dataset_path, limit) from None

    def request(pair: tuple[str, str]) -> SampleRequest | None:
        prompt, answer = pair
        number, given = _count(tokenizer, prompt), args.sharegpt_output_len
        output = _count(tokenizer, answer) if given is None else given
        fits = min(number, output) >= _MIN_TOKENS and number <= _MAX_PROMPT_TOKENS
        if not fits or number + output > _MAX_TOKENS:
            return None
        return SampleRequest(prompt, number, output)

    yield from _chosen(args, chance, pairs, request)


def _text(args: Any) -> str:
    path = args.dataset_path
    if path is None or not Path(path).is_file():
        raise InvalidInputError("dataset_path", path, f"must be a file for {args.dataset_name}")
    return Path(path).read_text(encoding="utf-8")


def _read(args: Any, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        limit = f"has text that is not JSON: {error}"
        raise InvalidInputError("dataset_path", args.dataset_path, limit) from None


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _chosen(
    args: Any,
    chance: random.Random,
    items: list[Any],
    request: Callable[[Any], SampleRequest | None],
) -> Iterable[SampleRequest]:
    """``num_prompts`` requests of a file's items, repeated if there are fewer."""
    if not args.disable_shuffle:
        chance.shuffle(items)
    found: list[SampleRequest] = []
    for item in items:
        made = request(item)
        if made is not None and len(found) < args.num_prompts:
            found.append(made)
    if not found:
        raise InvalidInputError("dataset_path", args.dataset_path, "has no usable prompt")
    yield from found
    if not args.no_oversample:
        for _ in range(args.num_prompts - len(found)):
            yield SampleRequest(**vars(chance.choice(found)))


_DATASETS = {"custom": _custom, "random": _random, "sharegpt": _sharegpt}
