"""A model class for lm-evaluation-harness: python examples/lm_eval_adapter.py --model pagespec ...

The command takes the options of ``lm_eval``. ``--model_args`` has the arguments of ``LLM``::

    pip install lm-eval
    python examples/lm_eval_adapter.py --model pagespec \\
        --model_args pretrained=FOLDER,max_num_seqs=64 --tasks hellaswag

Log-likelihoods come from ``LLM.score``. They do not depend on the batch, the chunks or the prefix
cache, so every run gives the same result.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pagespec import LLM, SamplingParams


@register_model("pagespec")
class PagespecLM(TemplateLM):
    """Implements the three request types of the harness.

    Args:
        pretrained: a folder, a hub id or a GGUF file.
        llm_arguments: arguments of :class:`pagespec.LLM`. ``batch_size`` and ``device=None``, which
            the harness adds, are ignored.
    """

    def __init__(self, pretrained: str, max_gen_toks: int = 256, **llm_arguments: Any) -> None:
        super().__init__()
        for name in ("batch_size", "max_batch_size"):
            llm_arguments.pop(name, None)
        if llm_arguments.get("device") is None:
            llm_arguments.pop("device", None)
        self.llm = LLM(pretrained, **llm_arguments)
        self.tokenizer = self.llm.tokenizer
        self.max_gen_toks = max_gen_toks
        # A request samples one token, so a prompt is at least one token shorter than the context.
        self.max_length = self.llm.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        prompts = [(context + answer)[-self.max_length :] for _, context, answer in requests]
        results = []
        for (key, _, answer), score in zip(requests, self.llm.score(prompts), strict=True):
            own = slice(-len(answer), None)
            total = sum(value for value in score.logprobs[own] if value is not None)
            is_greedy = all(rank in (1, None) for rank in score.ranks[own])
            results.append((total, is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        prompts, params = [], []
        for text, given in (request.args for request in requests):
            wanted = normalize_gen_kwargs(dict(given), self.max_gen_toks)
            max_tokens = wanted.pop("max_gen_toks")
            until = [stop for stop in wanted.pop("until") if stop]
            if not wanted.pop("do_sample", None):
                wanted["temperature"] = 0.0
            prompts.append(
                {"prompt_token_ids": self.tok_encode(text)[max_tokens - self.max_length :]}
            )
            params.append(SamplingParams(max_tokens=max_tokens, stop=until, **wanted))
        outputs = self.llm.generate(prompts, params)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


if __name__ == "__main__":
    cli_evaluate()
