"""Small tokenizers with chat templates in the styles of models that reason and call tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from pagespec.chat.reader import ChatReader
from pagespec.engine.inputs import PromptInput, PromptReader
from tests.support.models import tiny_model
from tests.support.tokenizers import byte_level

# Roughly as the models' own; "<think>" is a plain token there, as it is here.
QWEN_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if opens_thinking %}<think>
{% elif enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
QWEN_XML_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n\n' if loop.first and message.content else '' if loop.first else '\n' }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{ value if value is string else value | tojson if value is iterable else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if opens_thinking %}<think>
{% elif enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
GEMMA_TEMPLATE = """
{%- macro write(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is mapping %}{ {{- pairs(value) -}} }
{%- elif value is iterable %}[{% for v in value %}{{ write(v) }}{{ ',' if not loop.last }}
{%- endfor %}]
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- macro pairs(given) %}
{%- for k, v in given | dictsort %}{{ k }}:{{ write(v) }}{{ ',' if not loop.last }}{% endfor %}
{%- endmacro -%}
<bos>
{%- if tools %}<|turn>system
{{ tools | tojson }}<turn|>
{% endif %}
{%- for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.reasoning_content %}<|channel>thought
{{ message.reasoning_content }}
<channel|>{% endif %}
{%- for call in message.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{ {{- pairs(call.function.arguments) -}} }<tool_call|>
{%- endfor %}{{ message.content }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
PLAIN_TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

QWEN_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GEMMA_SPECIAL = [
    "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>",
    "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
]  # fmt: skip
STYLES = {"qwen3": QWEN_SPECIAL, "qwen3_5": QWEN_SPECIAL, "gemma4": GEMMA_SPECIAL}
END = {"qwen3": "<|im_end|>", "qwen3_5": "<|im_end|>", "gemma4": "<turn|>"}
TEMPLATES = {"qwen3": QWEN_TEMPLATE, "qwen3_5": QWEN_XML_TEMPLATE, "gemma4": GEMMA_TEMPLATE}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def chat_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """A token is a byte, a few are two; delimiters are one token each. The style "plain" has none,
    nor has its template."""
    tokenizer = byte_level()
    if style == "plain":
        tokenizer.chat_template = PLAIN_TEMPLATE
        return tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": STYLES[style]})
    if style != "gemma4":
        tokenizer.add_tokens(QWEN_PLAIN)
    tokenizer.chat_template = TEMPLATES[style]
    return tokenizer


def make_reader(
    style: str | None, tokenizer: PreTrainedTokenizerFast, **settings: Any
) -> ChatReader:
    """
    Args:
        style: whose end token ends answers; None: "</s>" does.
        settings: of ``ChatReader``.
    """
    prompts = PromptReader(tokenizer, len(tokenizer), 10_000)
    ends = [END[style]] if style in END else ["</s>"]
    return ChatReader(
        prompts,
        tokenizer,
        eos_token_ids=frozenset(tokenizer.convert_tokens_to_ids(ends)),
        **settings,
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prompt_of(reader: ChatReader, **arguments: object) -> PromptInput:
    return reader.read([{"role": "user", "content": "hé?"}], **arguments)  # type: ignore[arg-type]


def save_chat_model(folder: Path, end: str = END["qwen3"]) -> str:
    """A tiny random model whose tokenizer has the chat template of qwen3.

    Args:
        end: the end token of its configs.
    """
    tokenizer = chat_tokenizer("qwen3")
    (end_id,) = tokenizer.convert_tokens_to_ids([end])
    model = tiny_model("qwen3", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = end_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
