"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ..errors import InvalidInputError
from ..llm import LLM
from ..serving.lanes import lane_of
from .basic import check_model
from .bodies import BodyRoute, require_bounded
from .context import Context
from .errors import ApiError
from .protocol.fields import Body, Neutral
from .protocol.shapes import Integers, Object, Objects
from .sse import dumps
from .template_fields import check_roles

router = APIRouter(route_class=BodyRoute)

# A tokenizer decodes all tokens in one call, during which it holds the GIL.
MAX_NUM_TOKENS = 1 << 18
_BYTES_PER_TOKEN = 4

# Settings of a tokenizer that affect its tokens; other settings may be local paths.
_SHOWN = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"),
    *("chat_template", "model_max_length", "padding_side", "truncation_side"),
)


class TokenizeRequest(Body):
    """Either a text or a conversation."""

    neutral: ClassVar[Neutral] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Default: true for `prompt`, false for `messages`."
    )
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    tools: Objects | None = None
    chat_template_kwargs: Object | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Integers


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, context: Context) -> Response:
    """The tokens of a text, or of a conversation rendered with the model's template."""
    check_model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    opens = "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt
    if body.continue_final_message and opens:
        limit = "must be false if add_generation_prompt is true"
        raise InvalidInputError("continue_final_message", True, limit)
    field, num_bytes = "messages", len(await request.body())
    if body.prompt is not None:
        field, num_bytes = "prompt", len(body.prompt.encode("utf-8", "surrogatepass"))
    require_bounded(field, num_bytes, 1, context)
    written = await lane_of("text", num_bytes).run(_tokenized, context.engine.llm, body)
    return Response(written, media_type="application/json")


def _tokenized(llm: LLM, body: TokenizeRequest) -> bytes:
    tokens = _tokens(llm, body)
    tokenizer: Any = llm.tokenizer
    found = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
    strs = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return dumps({**found, "token_strs": strs}).encode()


def _tokens(llm: LLM, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        add = body.add_special_tokens is not False
        return llm.reader.encode(body.prompt, "prompt", add_special_tokens=add)
    check_roles(body.messages or (), llm.tokenizer)
    continues = bool(body.continue_final_message)
    prompt = llm.chat_reader.read(
        body.messages,
        tools=body.tools,
        tool_choice="none",  # no answer is read
        add_generation_prompt=body.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        chat_template_kwargs=body.chat_template_kwargs,
        # Only the text is used. Without truncation the prompt would have to fit in the context,
        # while a longer text may be counted.
        truncate=1,
    )
    add = bool(body.add_special_tokens)
    return llm.reader.encode(prompt.text or "", "messages", add_special_tokens=add)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: Context) -> Response:
    """The text of tokens."""
    check_model(context, body.model)
    llm, num_tokens = context.engine.llm, len(body.tokens)
    most = max(MAX_NUM_TOKENS, llm.max_model_len)
    if num_tokens > most:
        raise InvalidInputError("tokens", f"{num_tokens} tokens", f"must be at most {most}")
    lane = lane_of("text", num_tokens * _BYTES_PER_TOKEN)
    text = await lane.run(llm.reader.decode, body.tokens, "tokens")
    return Response(dumps({"prompt": text}).encode(), media_type="application/json")


@router.get("/tokenizer_info")
def tokenizer_info(context: Context) -> dict[str, Any]:
    """Special tokens, chat template and settings, for clients that build prompts themselves."""
    tokenizer = context.engine.llm.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this model has no tokenizer")
    settings = {name: getattr(tokenizer, name, None) for name in _SHOWN}
    special = getattr(tokenizer, "special_tokens_map", {})
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **{name: value for name, value in settings.items() if value is not None},
        **{name: _plain(value) for name, value in special.items()},
    }


def _plain(token: Any) -> Any:
    return [str(one) for one in token] if isinstance(token, (list, tuple)) else str(token)
