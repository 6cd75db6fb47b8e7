"""Parses, tokenises and validates prompts in all their forms."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

from ..errors import ContextLengthError, InvalidInputError
from ..params.checks import integer, is_int, is_list, text_or_parts
from ..params.declare import Check
from .policy import MAX_PRIORITY
from .sampling_params import SamplingParams
from .segments import Segment
from .text.reasoning import Reasoning
from .text.text_bounds import TextBound, is_plain, text_bound

# Texts with more characters per token of context are first tokenised piece by piece, to bound them.
_MAX_CHARS_PER_TOKEN = 8
_PIECE_CHARS_PER_TOKEN, _MIN_PIECE_CHARS = 4, 1 << 16
# A cut between pieces, for tokenizers whose tokens may absorb white space: few blanks are near it.
_CUT = re.compile(r"\S\s{0,8}(?=\S)")
_TEXT_AND_IDS = ("prompt", "prompt_token_ids")
_PROMPT_FORMS = (*_TEXT_AND_IDS, "segments")
# Fields of vLLM's prompts that must be None or empty here.
_CONTENT_KEYS = (
    *("multi_modal_data", "prompt_embeds", "multi_modal_uuids", "mm_processor_kwargs"),
    *("token_type_ids", "prompt_token_offsets"),
)
_EMPTY = "must not be empty: a decoder prompt cannot be empty"
_NO_CONTENT = "is not supported: a prompt has tokens only"
_PLACEHOLDER = 0
"""The token id at positions of other content."""

ReadContent = Callable[[str, Any], Segment]
"""Reads a content segment of one kind, from the field's name and its value; raises
InvalidInputError."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A checked prompt.

    Attributes:
        text: None when token ids were given without their text.
        token_ids: with placeholders at the positions of content segments.
        priority: 0 (the most urgent) to ``MAX_PRIORITY``; used by the policy "priority" only.
        owner: the owner that the policy "fair" charges.
        is_scored: only log-probabilities of the prompt are computed; the one sampled token is
            discarded, and needs no space in the context.
        end_token_ids: tokens that end its answers in addition to the model's own, unless ignored.
        reasoning: for a conversation, reasoning that may precede the content of the answer.
        segments: for a prompt with content other than tokens; otherwise None.
        prediction: tokens that the answer is predicted to have, a hint for drafters.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""
    priority: int = 0
    owner: str = ""
    is_scored: bool = False
    end_token_ids: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    segments: tuple[Segment, ...] | None = None
    prediction: tuple[int, ...] = ()


def require_unicode(field: str, text: str) -> None:
    """Refuse lone surrogates, which Python strings and JSON can contain but tokenizers refuse.

    Raises:
        InvalidInputError: ``text`` contains one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(field, text, f"is not Unicode text ({error.reason})") from error


class Marks(TypedDict, total=False):
    """Optional fields of a prompt's dict, see :class:`PromptInput`."""

    cache_salt: str | None
    priority: int | None
    owner: str | None
    prediction: Any


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidInputError(field, value, "must be text")
    require_unicode(field, value)
    return value


def _salt(field: str, value: Any) -> bytes:
    return _text(field, value).encode()


check_priority = integer(0, MAX_PRIORITY, f"from 0, the most urgent, to {MAX_PRIORITY}")
_MARKS: dict[str, Check] = {
    "cache_salt": _salt,
    "priority": check_priority,
    "owner": _text,
}


def _read_segments(
    field: str, segments: Any, kinds: Mapping[str, ReadContent]
) -> tuple[list[Any], tuple[Segment, ...] | None]:
    """The tokens of a list of segments, concatenated, and the segments; None if all are token
    segments, whose boundaries have no meaning."""
    if not is_list(segments) or not segments:
        limit = "must be a list of {'prompt_token_ids': ...}, at least one"
        raise InvalidInputError(field, segments, limit)
    token_ids: list[Any] = []
    found = []
    for i, segment in enumerate(segments):
        place = f"{field}[{i}]"
        is_one = isinstance(segment, Mapping) and len(segment) == 1
        kind: Any = next(iter(segment)) if is_one else None
        if kind in kinds:
            found.append(kinds[kind](f"{place}.{kind}", segment[kind]))
            token_ids += [_PLACEHOLDER] * found[-1].length
            continue
        if kind != "prompt_token_ids":
            forms = " or ".join(f"{{{name!r}: ...}}" for name in ("prompt_token_ids", *kinds))
            which = "content" if kinds else "content than tokens"
            limit = f"must be {forms}: other {which} is not supported"
            raise InvalidInputError(place, segment, limit)
        if not is_list(segment[kind]) or not segment[kind]:
            limit = "must be a list of token ids, at least one"
            raise InvalidInputError(f"{place}.{kind}", segment[kind], limit)
        token_ids += segment[kind]
        found.append(Segment(len(segment[kind])))
    has_contents = any(segment.content_hash is not None for segment in found)
    return token_ids, tuple(found) if has_contents else None


def split_prompts(prompts: Any) -> list[Any]:
    """Split the argument of ``generate`` into prompts: a text, a list of token ids, a dict, or a
    list of those."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not is_list(prompts):
        raise InvalidInputError("prompts", prompts, "must be text, token ids, a dict, or a list")
    if prompts and all(is_int(p) for p in prompts):
        return [prompts]
    return list(prompts)


def pair_params(
    prompts: Sequence[Any], params: Any, default: Callable[[], SamplingParams]
) -> list[Any]:
    """One set of sampling parameters per prompt; items of a list are not checked.

    Args:
        default: makes the parameters if none are given.

    Raises:
        InvalidInputError: ``params`` is neither parameters nor a list, or its length is wrong.
    """
    if params is None:
        params = default()
    if isinstance(params, SamplingParams):
        return [params.frozen()] * len(prompts)
    if not is_list(params):
        limit = "must be a SamplingParams, or a list with one per prompt"
        raise InvalidInputError("sampling_params", params, limit)
    if len(params) != len(prompts):
        limit = f"{len(params)} given for {len(prompts)} prompts"
        raise InvalidInputError("sampling_params", params, limit)
    return list(params)


def truncation_of(params: Any) -> int | None:
    """``truncate_prompt_tokens`` of unchecked parameters; None for other objects."""
    return params.truncate_prompt_tokens if isinstance(params, SamplingParams) else None


class PromptReader:
    """Tokenises and checks prompts for one model.

    Args:
        tokenizer: a transformers tokenizer; None: only token ids are accepted.
        vocab_size: token ids must be below it.
        max_model_len: prompts must leave space for one generated token, unless they are scored.
        kinds: supported kinds of content segments, each with its reader. Others are refused.

    Attributes:
        encoding_lock: held while a tokenizer that is not thread-safe encodes a text or renders a
            chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        kinds: Mapping[str, ReadContent] | None = None,
    ) -> None:
        self._kinds = kinds or {}
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        # Threads may share a fast tokenizer if no call changes its settings: changing them during
        # another thread's encoding raises "Already borrowed". Decoding changes no setting. No step
        # of the engine waits for this lock.
        self._is_shared = is_plain(tokenizer)
        self.encoding_lock = threading.RLock()

    def read(
        self,
        prompt: Any,
        field: str = "prompt",
        truncate: int | None = None,
        *,
        is_scored: bool = False,
        add_special_tokens: bool = True,
    ) -> PromptInput:
        """
        Args:
            truncate: number of the last tokens to keep; -1: as many as leave space for one token.
            add_special_tokens: the tokenizer adds its special tokens, such as BOS, to a text.
            is_scored: see :class:`PromptInput`; the prompt may have ``max_model_len`` tokens.

        Raises:
            InvalidInputError: the prompt is refused; names ``field``, the value and the limit.
        """
        marks: dict[str, Any] = {}
        segments: tuple[Segment, ...] | None = None
        text: str | None = None
        if isinstance(prompt, Mapping):
            for key in _CONTENT_KEYS:
                if prompt.get(key) is not None and prompt[key] != {}:
                    raise InvalidInputError(f"{field}.{key}", prompt[key], _NO_CONTENT)
            unknown = set(prompt).difference(_PROMPT_FORMS, Marks.__annotations__, _CONTENT_KEYS)
            forms = tuple(form for form in _PROMPT_FORMS if form in prompt)
            if unknown or (len(forms) != 1 and forms != _TEXT_AND_IDS):
                limit = (
                    "must have either 'prompt' or 'prompt_token_ids', or both, or 'segments', "
                    "and at most 'cache_salt', 'priority', 'owner' and 'prediction' besides"
                )
                raise InvalidInputError(field, dict(prompt), limit)
            marks = self._checked_marks(field, prompt)
            text = prompt.get("prompt")
            is_none = text is None and forms == _TEXT_AND_IDS
            if "prompt" in prompt and not isinstance(text, str) and not is_none:
                limit = "must be text; token ids go into 'prompt_token_ids'"
                raise InvalidInputError(f"{field}.prompt", text, limit)
            if text is not None:
                require_unicode(field, text)
            if "segments" in prompt:
                given = prompt["segments"]
                prompt, segments = _read_segments(f"{field}.segments", given, self._kinds)
            elif forms == ("prompt",):
                prompt = text
            else:
                prompt = prompt["prompt_token_ids"]
                if not is_list(prompt):
                    limit = "must be a list of token ids; text goes into 'prompt'"
                    raise InvalidInputError(f"{field}.prompt_token_ids", prompt, limit)
        if isinstance(prompt, str):
            options = {} if add_special_tokens else {"add_special_tokens": False}
            token_ids = self._tokenize(prompt, field, truncate, **options)
            text = prompt
        elif is_list(prompt):
            token_ids = list(prompt)
        else:
            raise InvalidInputError(field, prompt, "must be text or a list of token ids")
        if is_scored and segments is not None:
            limit = "must be tokens to be scored: it has other content"
            raise InvalidInputError(field, segments, limit)
        token_ids = self._truncated(token_ids, truncate, segments)
        token_ids = self._check(token_ids, field, is_scored=is_scored)
        return PromptInput(text, token_ids, is_scored=is_scored, segments=segments, **marks)

    def read_all(
        self,
        prompts: Sequence[Any],
        truncate: Sequence[int | None] | None = None,
        **options: bool,
    ) -> list[PromptInput]:
        """The prompts of one call; an error names the prompt that it refers to. ``options``: as
        for :meth:`read`."""
        is_single = len(prompts) == 1
        return [
            self.read(
                prompt,
                "prompt" if is_single else f"prompts[{i}]",
                None if truncate is None else truncate[i],
                **options,
            )
            for i, prompt in enumerate(prompts)
        ]

    def read_or_keep(
        self, prompt: Any, field: str = "prompt", truncate: int | None = None, **options: bool
    ) -> PromptInput:
        """As :meth:`read`; a ``PromptInput`` was read before, and is only truncated."""
        if not isinstance(prompt, PromptInput):
            return self.read(prompt, field, truncate, **options)
        token_ids = self._truncated(prompt.token_ids, truncate, prompt.segments)
        return replace(prompt, token_ids=token_ids)

    def marked(self, prompt: PromptInput, **marks: Unpack[Marks]) -> PromptInput:
        """A prompt that was read before, with these fields; None keeps a field."""
        for name in marks.keys() - Marks.__annotations__.keys():
            raise TypeError(f"a prompt has no {name}")
        given = {name: value for name, value in marks.items() if value is not None}
        return replace(prompt, **self._checked_marks("prompt", given))

    def _checked_marks(self, field: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The validated optional fields among ``given``."""
        found = {n: _MARKS[n](f"{field}.{n}", given[n]) for n in _MARKS if n in given}
        if "prediction" in given:
            found["prediction"] = self.read_prediction(given["prediction"], f"{field}.prediction")
        return found

    def read_prediction(self, value: Any, field: str = "prediction") -> tuple[int, ...]:
        """The tokens of a predicted answer.

        Args:
            value: a text, a list of token ids, OpenAI's ``{"type": "content", "content": ...}``,
                whose content is a text or a list of text parts, or None.

        Raises:
            InvalidInputError: it has another form, or cannot fit in the context.
        """
        if value is None:
            return ()
        if isinstance(value, Mapping):
            if set(value) != {"type", "content"} or value["type"] != "content":
                limit = "must be {'type': 'content', 'content': text}"
                raise InvalidInputError(field, dict(value), limit)
            content = text_or_parts(f"{field}.content", value["content"])
            if not isinstance(content, str):
                content = "".join(part["text"] for part in content)
            value = content
        if isinstance(value, str):
            token_ids = self.encode_prompt(value, field) if value else []
        elif is_list(value):
            token_ids = list(value)
        else:
            raise InvalidInputError(field, value, "must be text, token ids or OpenAI's object")
        if token_ids:
            self._check(token_ids, field, is_scored=True)
        return tuple(token_ids)

    def _truncated(
        self,
        token_ids: list[Any],
        truncate: int | None,
        segments: Sequence[Segment] | None = None,
    ) -> list[Any]:
        if truncate is None:
            return token_ids
        kept = token_ids[-(self._max_model_len - 1 if truncate == -1 else truncate) :]
        if segments is not None and len(kept) < len(token_ids):
            limit = f"must keep all {len(token_ids)} positions: the prompt has more than tokens"
            raise InvalidInputError("truncate_prompt_tokens", truncate, limit)
        return kept

    def encode(
        self, text: str, field: str = "bad_words", *, add_special_tokens: bool = False
    ) -> list[int]:
        """The token ids of a text.

        Raises:
            InvalidInputError: the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidInputError(field, text, "this model has no tokenizer")
        require_unicode(field, text)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_prompt(
        self, text: str, field: str = "prompt", truncate: int | None = None
    ) -> list[int]:
        """The token ids of a prompt's text, without special tokens added. A text that cannot fit
        in the context is refused before it is tokenised, unless it is truncated.

        Raises:
            InvalidInputError: the model has no tokenizer, or the text is too long.
        """
        if self._tokenizer is None:
            raise InvalidInputError(field, text, "this model has no tokenizer")
        require_unicode(field, text)
        if truncate is None:
            self._require_room(text, field)
        return self._encode(text, add_special_tokens=False)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Hold the lock if the tokenizer is not thread-safe."""
        if self._is_shared:
            yield
        else:
            with self.encoding_lock:
                yield

    def _encode(self, text: str, **options: Any) -> list[int]:
        # Masks and token types are not used, and would be millions of elements for a long text.
        options = {**options, "return_attention_mask": False, "return_token_type_ids": False}
        with self.guarded():
            if self._is_shared and not self._is_set_up:
                with self.encoding_lock:
                    self._tokenizer("", **options)  # sets it up for this and all later calls
            token_ids: list[int] = self._tokenizer(text, **options)["input_ids"]
        return token_ids

    @property
    def _is_set_up(self) -> bool:
        """Whether a call without truncation and padding changes no setting of the tokenizer."""
        backend = self._tokenizer.backend_tokenizer
        splits = getattr(self._tokenizer, "split_special_tokens", False)
        return (
            backend.truncation is None
            and backend.padding is None
            and backend.encode_special_tokens == splits
        )

    @cached_property
    def _bound(self) -> TextBound | None:
        return text_bound(self._tokenizer)

    def _require_room(self, text: str, field: str) -> None:
        """Refuse a text that cannot fit in the context, without tokenising all of it.

        The first bound uses its bytes. If that does not decide, its pieces are tokenised until they
        have twice the tokens of the context, more than cuts between pieces can account for.
        """
        most = self._max_model_len
        if len(text) <= most:
            return
        if self._bound is not None:
            num_tokens = self._bound.min_num_tokens(text)
            if num_tokens > most:
                raise ContextLengthError(field, num_tokens, self._max_model_len, is_least=True)
        if len(text) <= max(_MIN_PIECE_CHARS, _MAX_CHARS_PER_TOKEN * most):
            return
        num_tokens, num_chars = 0, max(_MIN_PIECE_CHARS, _PIECE_CHARS_PER_TOKEN * most)
        for piece in _pieces(text, num_chars, self._bound is None or not self._bound.has_spaces):
            num_tokens += len(self._encode(piece, add_special_tokens=False))
            if num_tokens > 2 * most:
                raise ContextLengthError(field, num_tokens // 2, self._max_model_len, is_least=True)

    def decode(self, token_ids: list[int], field: str) -> str:
        """The text of tokens, including special tokens.

        Raises:
            InvalidInputError: the model has no tokenizer, or no such tokens.
        """
        if self._tokenizer is None:
            raise InvalidInputError(field, token_ids, "this model has no tokenizer")
        self._check_ids(token_ids, field)
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def read_rendered(self, text: str, field: str, truncate: int | None = None) -> PromptInput:
        """Read a text that already contains special tokens, such as a rendered chat template.
        Raises like :meth:`read`."""
        token_ids = self.encode_prompt(text, field, truncate)
        return PromptInput(text, self._check(self._truncated(token_ids, truncate), field))

    def _tokenize(self, text: str, field: str, truncate: int | None, **options: bool) -> list[int]:
        if self._tokenizer is None:
            limit = "give token ids: this model has no tokenizer, or `skip_tokenizer_init=True`"
            raise InvalidInputError(field, text, limit)
        require_unicode(field, text)
        if truncate is None:
            self._require_room(text, field)
        token_ids = self._encode(text, **options)
        if not token_ids:
            raise InvalidInputError(field, text, _EMPTY)
        return token_ids

    def _check(self, token_ids: list[Any], field: str, *, is_scored: bool = False) -> list[int]:
        if not token_ids:
            raise InvalidInputError(field, token_ids, _EMPTY)
        if len(token_ids) >= self._max_model_len + is_scored:
            raise ContextLengthError(
                field, len(token_ids), self._max_model_len, is_scored=is_scored
            )
        self._check_ids(token_ids, field)
        return token_ids

    def _check_ids(self, token_ids: list[Any], field: str) -> None:
        # Loops in C: a Python loop took 0.2 us per id, which delays the first step of long prompts.
        are_ints = set(map(type, token_ids)) == {int}
        if are_ints and min(token_ids) >= 0 and max(token_ids) < self._vocab_size:
            return
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                limit = f"token ids must be integers from 0 to {self._vocab_size - 1}"
                if type(token_id) is int:
                    limit = f"out of vocabulary: {limit}"
                raise InvalidInputError(field, token_id, limit)


def _pieces(text: str, num_chars: int, spares_spaces: bool) -> Iterator[str]:
    """Pieces of a text with about ``num_chars`` characters, or somewhat more.

    Args:
        spares_spaces: cut only where little white space is nearby.
    """
    begin = 0
    while begin < len(text):
        end = begin + num_chars
        if spares_spaces:
            cut = _CUT.search(text, end)
            end = len(text) if cut is None else cut.end()
        yield text[begin:end]
        begin = end
