"""Minimal chat templates, one per format in which models write tool calls and reasoning.

Delimiters, separators and the types of values are those of the real models' templates.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tests.support.chat_models import GEMMA_SPECIAL, GEMMA_TEMPLATE
from tests.support.tokenizers import byte_level


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        calls, reasoning: names of formats that must be found; None: there is none.
        special: special tokens; ``plain``: added tokens that are none.
        ends: of them the token that ends an answer.
        max_calls: most calls of a message that the template accepts.
        is_alone: a message with calls has no content beside them.
        is_apart: it has either content or reasoning beside them.
        ambiguous: a pattern of texts that arguments cannot have: no reader could tell them from
            the end of an argument.
    """

    template: str
    calls: str
    reasoning: str | None
    special: tuple[str, ...]
    end: str
    plain: tuple[str, ...] = ()
    max_calls: int = 3
    is_alone: bool = False
    is_apart: bool = False
    ambiguous: str = "(?!)"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokens are single bytes and a few byte pairs; each delimiter is one token."""
        tokenizer = byte_level()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        tokenizer.add_tokens(list(self.plain))
        tokenizer.chat_template = self.template
        return tokenizer


_CHATML = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% else %}<|im_start|>assistant
HEAD{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
PROMPT{% endif %}"""


def _chatml(head: str, call: str, prompt: str = "") -> str:
    return _CHATML.replace("HEAD", head).replace("CALL", call).replace("PROMPT", prompt)


_THOUGHT = "<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n"
_HERMES_CALL = """
{{- '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>"""
_XML_CALL = """
{{- '' if loop.first and not message.content else '\\n\\n' if loop.first else '\\n' }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson if value is iterable else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>"""
_QWEN = {"special": ("<|im_start|>", "<|im_end|>"), "end": "<|im_end|>"}
_TOOL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_DEEPSEEK = """{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- else %}<｜Assistant｜>HEAD{{ message.content or '' }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}CALL{% endfor %}<｜tool▁calls▁end｜>
{%- endif %}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>PROMPT{% endif %}"""
_DEEPSEEK_TOKENS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_DEEPSEEK_CALL = """{{- '' if loop.first else '\\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>
{{- call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>"""
_DEEPSEEK_31_CALL = """<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>
{{- call.function.arguments | tojson }}<｜tool▁call▁end｜>"""


def _deepseek(head: str, call: str, prompt: str) -> str:
    return _DEEPSEEK.replace("HEAD", head).replace("CALL", call).replace("PROMPT", prompt)


# Templates of Mistral refuse ids that are not nine letters and digits.
_MISTRAL = """<s>
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif -%}
[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}
{%- endfor %}ANSWER</s>
{%- endif %}
{%- endfor %}"""
_MISTRAL_LIST = """
{%- if message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ ' ' }}
{{- call.function.arguments | tojson }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]
{%- else %}{{ message.content }}{% endif %}"""
_MISTRAL_NAMED = """
{%- if message.reasoning_content %}[THINK]{{ message.reasoning_content }}[/THINK]{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]
{{- call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"""
_MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)  # fmt: skip

_LLAMA = """
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'user' and tools %}{{ tools | tojson }}

{% endif %}
{%- if message.tool_calls %}CALLS{% else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_LLAMA_JSON = """
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls') }}{% endif %}
{%- set call = message.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ ' ' }}
{{- call.arguments | tojson }}}"""
_LLAMA_PYTHON = """[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value | tojson }}
{{- ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"""
_LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")

_GLM = """[gMASK]<sop>{% if tools %}<|system|>
{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'tool' %}<|observation|>
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}<|assistant|>
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{%- else %}<think></think>{% endif %}
{%- if message.content %}
{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments | items %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- else %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
_KIMI_TOKENS = (
    "<|im_end|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip

_MINIMAX_LINES = """{% if tools %}<begin_of_tools>{{ tools | tojson }}{% endif %}
{%- for message in messages %}<beginning_of_sentence>{{ message.role }}
{{ message.content }}
{%- if message.tool_calls %}
{{- '\\n' if message.content }}<tool_calls>
{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ ' ' }}
{{- call.function.arguments | tojson }}}
{% endfor %}</tool_calls>{% endif %}<end_of_sentence>
{% endfor %}
{%- if add_generation_prompt %}<beginning_of_sentence>assistant
{% endif %}"""

_MINIMAX_TAGS = """{% if tools %}]~b]system
{{ tools | tojson }}[e~[
{% endif %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}]~b]{{ message.role }}
{{ message.content }}[e~[
{% else %}]~b]ai
<think>
{{ message.reasoning_content or '' }}
</think>

{{ message.content }}
{%- if message.tool_calls %}{{ '\\n' if message.content }}<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for name, value in call.function.arguments | items %}<parameter name="{{ name }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

_HARMONY = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- if message.content %}<|start|>assistant<|channel|>commentary<|message|>
{{- message.content }}<|end|>
{%- endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.thinking }}<|end|>
{%- endif %}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.thinking }}<|end|>
{%- endif %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>
{%- endif %}
{%- elif message.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_HARMONY_TOKENS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        _chatml(_THOUGHT, _HERMES_CALL), "hermes", "think", plain=_TOOL_TOKENS, **_QWEN
    ),
    "qwen2.5": Family(_chatml("", _HERMES_CALL), "hermes", None, **_QWEN),
    "qwen3_coder": Family(
        _chatml("", _XML_CALL),
        "qwen3_coder",
        None,
        ambiguous=r"</parameter>\s*(<parameter=[^>\n]+>|</function>\s*</tool_call>)",
        **_QWEN,
    ),
    "qwen3_5": Family(
        _chatml(_THOUGHT, _XML_CALL, "<think>\n"),
        "qwen3_coder",
        "think",
        plain=_TOOL_TOKENS,
        ambiguous=r"</parameter>\s*(<parameter=[^>\n]+>|</function>\s*</tool_call>)",
        **_QWEN,
    ),
    "deepseek_r1": Family(
        _deepseek(_THOUGHT, _DEEPSEEK_CALL, "<think>\n"),
        "deepseek",
        "think",
        special=_DEEPSEEK_TOKENS,
        end="<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": Family(
        _deepseek(
            "{{ '<think>' + message.reasoning_content if message.reasoning_content }}</think>",
            _DEEPSEEK_31_CALL,
            "",
        ),
        "deepseek",
        "think",
        special=_DEEPSEEK_TOKENS,
        plain=("<think>", "</think>"),
        end="<｜end▁of▁sentence｜>",
    ),
    "mistral_nemo": Family(
        _MISTRAL.replace("ANSWER", _MISTRAL_LIST),
        "mistral",
        None,
        special=_MISTRAL_TOKENS,
        end="</s>",
        is_alone=True,
    ),
    "mistral_small": Family(
        _MISTRAL.replace("ANSWER", _MISTRAL_NAMED),
        "mistral",
        "mistral",
        special=(*_MISTRAL_TOKENS, "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        end="</s>",
    ),
    "llama3": Family(
        _LLAMA.replace("CALLS", _LLAMA_JSON),
        "llama3_json",
        None,
        special=_LLAMA_TOKENS,
        end="<|eot_id|>",
        max_calls=1,
        is_alone=True,
    ),
    "llama_pythonic": Family(
        _LLAMA.replace("CALLS", _LLAMA_PYTHON),
        "pythonic",
        None,
        special=_LLAMA_TOKENS,
        end="<|eot_id|>",
        is_alone=True,
    ),
    "glm45": Family(
        _GLM,
        "glm45",
        "think",
        special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        plain=_TOOL_TOKENS,
        end="<|user|>",
        ambiguous=r"</arg_value>\s*(<arg_key>[^<\n]+</arg_key>\s*<arg_value>|</tool_call>)",
    ),
    "kimi_k2": Family(_KIMI, "kimi_k2", "think", special=_KIMI_TOKENS, end="<|im_end|>"),
    "minimax_m1": Family(
        _MINIMAX_LINES,
        "minimax",
        None,
        special=("<beginning_of_sentence>", "<end_of_sentence>"),
        end="<end_of_sentence>",
    ),
    "minimax_m2": Family(
        _MINIMAX_TAGS,
        "minimax_m2",
        "think",
        special=("]~b]", "[e~["),
        plain=("<minimax:tool_call>", "</minimax:tool_call>"),
        end="[e~[",
        ambiguous=r"</parameter>\s*(<parameter name=|</invoke>\s*(</minimax:tool_call>|<invoke))",
    ),
    "gpt_oss": Family(
        _HARMONY,
        "harmony",
        "harmony",
        special=_HARMONY_TOKENS,
        end="<|return|>",
        max_calls=1,
        is_apart=True,
    ),
}
FAMILIES["gemma4"] = Family(
    GEMMA_TEMPLATE,
    "gemma4",
    "gemma4",
    special=tuple(GEMMA_SPECIAL),
    end="<turn|>",
    ambiguous=r'<\|"\|>',
)

_TAGGED_VALUE = "{{ value if value is string else value | tojson }}"
_SEED_THOUGHT = (
    "{% if message.reasoning_content %}<seed:think>{{ message.reasoning_content }}</seed:think>"
    "{% endif %}"
)
_SEED_CALL = """
{{- '\\n' }}<seed:tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>VALUE</parameter>
{% endfor %}</function>
</seed:tool_call>""".replace("VALUE", _TAGGED_VALUE)
_DSML_CALL = """
{{- '\\n\\n<|DSML|function_calls>\\n' if loop.first }}<|DSML|invoke name="
{{- call.function.name }}">
{% for name, value in call.function.arguments | items %}<|DSML|parameter name="{{ name }}" string="
{{- 'true' if value is string else 'false' }}">VALUE</|DSML|parameter>
{% endfor %}</|DSML|invoke>
{{ '</|DSML|function_calls>' if loop.last }}""".replace("|DSML|", "｜DSML｜")
_DSML_CALL = _DSML_CALL.replace("VALUE", _TAGGED_VALUE)
_JSON_CALL = (
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
)


def _list_of_calls(begin: str, call: str, end: str) -> str:
    """Calls as one list between delimiters."""
    return f"{{{{- '{begin}[' if loop.first else ', ' }}}}{call}{{{{- ']{end}' if loop.last }}}}"


_PYTHON_CALL = """{{ call.function.name }}(
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value | tojson }}
{{- ', ' if not loop.last }}{% endfor %})"""
_COHERE_CALL = (
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}'
)
_COHERE_THOUGHT = (
    "{% if message.reasoning_content %}<|START_THINKING|>{{ message.reasoning_content }}"
    "<|END_THINKING|>{% endif %}"
)
_COHERE_TOKENS = (
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>",
)  # fmt: skip
_IM = ("<|im_start|>", "<|im_end|>")
FAMILIES |= {
    "seed_oss": Family(
        _chatml(_SEED_THOUGHT, _SEED_CALL),
        "seed_oss",
        "seed_oss",
        plain=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        ambiguous=r"</parameter>\s*(<parameter=[^>\n]+>|</function>\s*</seed:tool_call>)",
        **_QWEN,
    ),
    "deepseek_v32": Family(
        _chatml("", _DSML_CALL),
        "deepseek_v32",
        None,
        special=(*_IM, "｜DSML｜"),
        end="<|im_end|>",
        ambiguous=r"｜DSML｜",
    ),
    "nemotron": Family(
        _chatml("", _list_of_calls("<TOOLCALL>", _JSON_CALL, "</TOOLCALL>")),
        "nemotron",
        None,
        **_QWEN,
    ),
    "functionary": Family(
        _chatml(
            "",
            "<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>",
        ),
        "functionary",
        None,
        **_QWEN,
    ),
    "phi4_mini": Family(
        _chatml("", _list_of_calls("<|tool_call|>", _JSON_CALL, "<|/tool_call|>")),
        "phi4_mini_json",
        None,
        special=(*_IM, "<|tool_call|>", "<|/tool_call|>"),
        end="<|im_end|>",
    ),
    "granite3": Family(
        _chatml("", _list_of_calls("<|tool_call|>", _JSON_CALL, "")),
        "granite",
        None,
        special=(*_IM, "<|tool_call|>"),
        end="<|im_end|>",
    ),
    "lfm2": Family(
        _chatml("", _list_of_calls("<|tool_call_start|>", _PYTHON_CALL, "<|tool_call_end|>")),
        "lfm2",
        None,
        special=(*_IM, "<|tool_call_start|>", "<|tool_call_end|>"),
        end="<|im_end|>",
    ),
    "cohere": Family(
        _chatml(
            _COHERE_THOUGHT, _list_of_calls("<|START_ACTION|>", _COHERE_CALL, "<|END_ACTION|>")
        ),
        "cohere",
        "cohere",
        special=(*_IM, *_COHERE_TOKENS),
        end="<|im_end|>",
    ),
}
