"""``/v1/chat/completions``: answers to conversations, split into content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from ..chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, joined, message_of
from ..chat.messages import joined_parts, read_tools
from ..chat.response import ResponseReader
from ..chat.tool_choice import ToolChoice, forced_output
from ..engine.inputs import PromptInput
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidInputError
from ..serving.lanes import lane_of
from .bodies import BodyRoute, require_bounded, run_for_body
from .call import Answer, read_call
from .context import Context, ServerContext
from .errors import context_errors
from .logprob_fields import content_logprobs, prompt_logprobs
from .protocol.absent import CHAT, CHAT_CHOICE, CHAT_MESSAGE
from .protocol.endpoints import ChatRequest, client_names
from .sampling import chat_params
from .sse import Choices, Piece, respond
from .template_fields import check_effort, check_roles, template_variables

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request, context: Context) -> Response:
    """Answer a conversation."""
    call = read_call(body, request, context, "chatcmpl-")
    num_bytes = len(await request.body())
    choice, params = await run_for_body(num_bytes, _read_fields, body, context)
    require_bounded("messages", num_bytes, params.truncate_prompt_tokens, context)
    with context_errors(params.max_tokens or 1):
        prompt = await lane_of("text", num_bytes).run(_read_prompt, body, context, params, choice)
    generations = await call.submit([(prompt, params)])
    return await respond(_Choices(choice, call, params, generations))


def _read_fields(body: ChatRequest, context: ServerContext) -> tuple[ToolChoice, SamplingParams]:
    """Read all fields but the prompt."""
    tokenizer = context.engine.llm.tokenizer
    check_roles(body.messages, tokenizer)
    check_effort(body.reasoning_effort, tokenizer)
    tools, choice = read_tools(body.tools), _tool_choice(body)
    with client_names(body):
        return choice, chat_params(body, context.defaults, forced_output(tools, choice))


def _tool_choice(body: ChatRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return "auto" if body.tools else "none"
    if choice == "auto" and not body.tools:
        raise InvalidInputError("tool_choice", choice, "needs tools")
    return choice if isinstance(choice, str) else choice.model_dump()


def _read_prompt(
    body: ChatRequest, context: ServerContext, params: SamplingParams, choice: ToolChoice
) -> PromptInput:
    llm = context.engine.llm
    variables = template_variables(
        body.chat_template_kwargs, body.reasoning_effort, body.documents, llm.tokenizer
    )
    prompt = llm.chat_reader.read(
        body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        tool_choice=choice,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=variables,
        stop_in_reasoning=bool(body.stop_in_reasoning),
        truncate=params.truncate_prompt_tokens,
    )
    if not body.prediction:
        return prompt
    return replace(prompt, prediction=llm.reader.read_prediction(body.prediction))


class _Choices(Choices[ChatRequest]):
    head_names: ClassVar = {"id": "", "object": "chat.completion.chunk"}

    def __init__(self, tool_choice: ToolChoice, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tool_choice, self._prompt = tool_choice, self.generations[0].prompt
        self._answers: dict[int, ChatAnswer] = {}
        self._echoed = _last_answer(self._body) if self._body.echo else ""
        self.is_long = True

    def content(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        (result,) = results
        found: dict[str, Any] = {
            **self.head,
            **CHAT,
            "object": "chat.completion",
            "choices": [self.choice(answer) for answer in result.outputs],
            "usage": self.usage(),
        }
        if self._body.return_token_ids:
            found["prompt_token_ids"] = result.prompt_token_ids
        if self._body.return_prompt_text:
            found["prompt_text"] = self._prompt.text
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
        return found

    def pieces(self, _place: int, delta: Answer) -> Iterator[Piece]:
        """The role first, then the deltas, then the finish reason. If each chunk has the usage, the
        finish reason is in the last delta's chunk, as in vLLM: so each chunk counts more tokens.
        """
        index = delta.index
        if index not in self._answers:
            prompt = self._prompt.token_ids if self._body.return_token_ids else None
            text = self._prompt.text if self._body.return_prompt_text else None
            extra = {"prompt_token_ids": prompt, "prompt_text": text} if not self._answers else None
            yield Piece(
                _chunk(index, {"role": "assistant", "content": ""}), extra, has_tokens=False
            )
            if self._echoed:
                yield Piece(_chunk(index, {"content": self._echoed}), has_tokens=False)
        answer = self._answer(index)
        # With several chunks, the fields about tokens are in the first one.
        marks = self._marks(delta)
        found, is_last = answer.read(delta), delta.finish_reason is not None
        shown = [_shown(part) for part in found]
        if is_last and not (self.has_usages and shown):
            shown.append({})
        for part in shown[: -1 if is_last else None]:
            yield Piece(_chunk(index, part, **marks))
            marks = {} if self._body.return_token_ids else {"token_ids": None}
        if is_last:
            reason = answer.finish_reason(delta)
            last = _chunk(index, shown[-1], reason, stop_reason=delta.stop_reason, **marks)
            yield Piece(last)
        elif any(value is not None for value in marks.values()):
            yield Piece(_chunk(index, {}, **marks))

    def choice(self, delta: Answer) -> dict[str, Any]:
        """The choice for a whole answer."""
        answer = self._answer(delta.index)
        message = answer.message(delta)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        return {
            "index": delta.index,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finish_reason(delta),
            "stop_reason": delta.stop_reason,
            **CHAT_CHOICE,
            **self._marks(delta),
        }

    @property
    def num_reasoning_tokens(self) -> int | None:
        if self._llm.chat_reader.answer_format is None:
            return None
        return sum(answer.num_reasoning_tokens for answer in self._answers.values())

    @property
    def prediction_counts(self) -> tuple[int, int] | None:
        return self.generations[0].prediction_counts if self._body.prediction else None

    def _answer(self, index: int) -> ChatAnswer:
        answer = self._answers.get(index)
        if answer is None:
            reader = self._llm.chat_reader.reader(
                self._prompt,
                self._params,
                tools=self._body.tools,
                tool_choice=self._tool_choice,
                request_id=str(self.head["id"]),
                index=index,
            )
            answer = self._answers[index] = ChatAnswer(
                reader,
                with_reasoning=self._body.include_reasoning is not False,
                max_num_calls=1 if self._body.parallel_tool_calls is False else None,
            )
        return answer

    def _marks(self, delta: Answer) -> dict[str, Any]:
        """Fields of a chunk that describe its tokens."""
        marks: dict[str, Any] = {}
        if delta.logprobs is not None:
            num_top = -1 if self._body.logprob_token_ids else self._body.top_logprobs or 0
            marks["logprobs"] = content_logprobs(
                delta.token_ids, delta.logprobs, num_top, self.texts.entry
            )
        marks["token_ids"] = delta.token_ids if self._body.return_token_ids else None
        return marks


class ChatAnswer:
    """One growing answer: content, reasoning, tool calls, finish reason.

    Args:
        with_reasoning: if False, reasoning is dropped.
        max_num_calls: tool calls beyond this number are dropped.

    Attributes:
        num_reasoning_tokens: number of tokens up to the last one that added to the reasoning.
    """

    def __init__(
        self, reader: ResponseReader, *, with_reasoning: bool, max_num_calls: int | None
    ) -> None:
        self._reader = reader
        self._with_reasoning, self._max_num_calls = with_reasoning, max_num_calls
        self._num_tokens = 0
        self._is_begun = False  # whether the content or a call has begun
        self._has_calls = False
        self.num_reasoning_tokens = 0

    def read(self, delta: Answer) -> list[Delta]:
        """The deltas for these tokens; at the end including held-back text."""
        found: list[Delta] = []
        token_ids = delta.token_ids
        place = 0
        # Token by token: the count must not depend on how the stream is split.
        while not self._is_begun and place < len(token_ids):
            found += self._noted(self._reader.feed(token_ids[place : place + 1]), 1)
            place += 1
        if place < len(token_ids):
            found += self._noted(self._reader.feed(token_ids[place:]), len(token_ids) - place)
        if delta.finish_reason is not None:
            found += self._noted(self._reader.finish(), 0)
        return [part for part in joined(found) if self._is_kept(part)]

    def message(self, delta: Answer) -> dict[str, Any]:
        """The message of a whole answer, in OpenAI's form, with both of vLLM's reasoning fields."""
        message = message_of(self.read(delta))
        message.update(CHAT_MESSAGE)
        message["reasoning"] = message["reasoning_content"]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return message

    def finish_reason(self, delta: Answer) -> str | None:
        """The engine's finish reason, unless the answer ended with tool calls."""
        if self._has_calls and delta.finish_reason == "stop":
            return "tool_calls"
        return delta.finish_reason

    def _noted(self, found: list[Delta], num_tokens: int) -> list[Delta]:
        self._num_tokens += num_tokens
        for part in found:
            if isinstance(part, ReasoningDelta):
                if not self._is_begun:
                    self.num_reasoning_tokens = self._num_tokens
            else:
                self._is_begun = True
        return found

    def _is_kept(self, part: Delta) -> bool:
        if isinstance(part, ReasoningDelta):
            return self._with_reasoning
        if isinstance(part, ToolCallDelta):
            self._has_calls = True
            return self._max_num_calls is None or part.index < self._max_num_calls
        return True


def _last_answer(body: ChatRequest) -> str:
    """The text of the last message if it is the assistant's; else empty."""
    last = body.messages[-1]
    return joined_parts("", last.get("content")) if last["role"] == "assistant" else ""


def _chunk(
    index: int, delta: dict[str, Any], reason: str | None = None, **marks: Any
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **marks}


def _shown(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    function = {"name": delta.name, "arguments": delta.arguments}
    call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return {"tool_calls": [call]}
