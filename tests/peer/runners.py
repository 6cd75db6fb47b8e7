"""``VllmRunner`` and ``HfRunner`` of its fixtures, as far as its tests use them."""

from __future__ import annotations

import gc
from typing import Any

from . import stand_in

# What its runner gives where a test gives nothing.
_DEFAULTS = {"seed": 0, "max_model_len": 1024, "block_size": 16}


def _prompts(prompts: list[Any], **media: Any) -> list[Any]:
    if any(value is not None for value in media.values()):
        stand_in.not_applicable("images and audio", ", ".join(media))
    kinds = {str: "prompt", list: "prompt_token_ids"}
    found = []
    for prompt in prompts:
        if isinstance(prompt, dict):
            found.append(dict(prompt))
        elif type(prompt) in kinds:
            found.append({kinds[type(prompt)]: prompt})
        else:
            found.append({"prompt_embeds": prompt})
    return found


class VllmRunner:
    """An ``LLM`` whose methods return plain tuples."""

    def __init__(self, model_name: str, **arguments: Any) -> None:
        from vllm import LLM

        arguments.pop("default_torch_num_threads", None)
        if "tokenizer_name" in arguments:
            arguments["tokenizer"] = arguments.pop("tokenizer_name")
        self.llm: Any = LLM(model=model_name, **_DEFAULTS | arguments)

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm
        gc.collect()

    def get_llm(self) -> Any:
        return self.llm

    def generate(
        self, prompts: list[Any], sampling_params: Any, return_logprobs: bool = False, **rest: Any
    ) -> Any:
        media = {name: rest.pop(name, None) for name in ("images", "videos", "audios")}
        answers = self.llm.generate(_prompts(prompts, **media), sampling_params, **rest)
        outputs, logprobs = [], []
        for answer in answers:
            ids = [answer.prompt_token_ids + list(each.token_ids) for each in answer.outputs]
            texts = [(answer.prompt or "") + each.text for each in answer.outputs]
            outputs.append((ids, texts))
            positions = list(answer.prompt_logprobs or [])
            for each in answer.outputs:
                positions += each.logprobs or []
            logprobs.append(positions)
        return (outputs, logprobs) if return_logprobs else outputs

    def generate_w_logprobs(
        self,
        prompts: list[Any],
        sampling_params: Any,
        include_prompt_token_ids: bool = False,
        **rest: Any,
    ) -> list[tuple[Any, ...]]:
        media = {name: rest.pop(name, None) for name in ("images", "videos", "audios")}
        found = []
        for answer in self.llm.generate(_prompts(prompts, **media), sampling_params, **rest):
            last = answer.outputs[-1]
            row: tuple[Any, ...] = (list(last.token_ids), last.text, last.logprobs)
            if sampling_params.prompt_logprobs is not None:
                ids = (answer.prompt_token_ids,) if include_prompt_token_ids else ()
                row = (*row, *ids, answer.prompt_logprobs)
            elif include_prompt_token_ids:
                row = (*row, answer.prompt_token_ids)
            found.append(row)
        return found

    def generate_greedy(self, prompts: list[Any], max_tokens: int, **rest: Any) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [(ids[0], texts[0]) for ids, texts in self.generate(prompts, greedy, **rest)]

    def generate_greedy_logprobs(
        self,
        prompts: list[Any],
        max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None = None,
        stop_token_ids: list[int] | None = None,
        stop: list[str] | None = None,
        **rest: Any,
    ) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs,
            stop_token_ids=stop_token_ids,
            stop=stop,
        )
        return self.generate_w_logprobs(prompts, greedy, **rest)

    def generate_beam_search(
        self,
        prompts: list[Any],
        beam_width: int,
        max_tokens: int,
        concurrency_limit: int | None = None,
        **media: Any,
    ) -> list[tuple[list[list[int]], list[str]]]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        inputs = _prompts(prompts, **media)
        answers = self.llm.beam_search(inputs, params, concurrency_limit=concurrency_limit)
        return [
            ([list(each.tokens) for each in answer.sequences], [e.text for e in answer.sequences])
            for answer in answers
        ]

    def apply_model(self, function: Any) -> Any:
        return self.llm.apply_model(function)

    def collective_rpc(self, *arguments: Any, **named: Any) -> Any:
        return self.llm.collective_rpc(*arguments, **named)


class HfRunner:
    """A transformers model, for comparison."""

    def __init__(self, model_name: str, dtype: str = "auto", **_: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.device = "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
        self.model = model.eval()
        self.config = model.config

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        del self.model
        gc.collect()

    def wrap_device(self, value: Any, device: str | None = None) -> Any:
        return value

    def _generate(self, prompt: Any, max_tokens: int, **more: Any) -> tuple[Any, int]:
        import torch

        inputs = self.tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            answer = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_tokens,
                return_dict_in_generate=True,
                tokenizer=self.tokenizer,
                **more,
            )
        return answer, inputs["input_ids"].shape[1]

    def generate_greedy(self, prompts: list[Any], max_tokens: int, **more: Any) -> Any:
        found = []
        for prompt in prompts:
            answer, _ = self._generate(prompt, max_tokens, **more)
            ids = answer.sequences[0].tolist()
            found.append((ids, self.tokenizer.decode(ids, skip_special_tokens=True)))
        return found

    def generate_greedy_logprobs(self, prompts: list[Any], max_tokens: int, **more: Any) -> Any:
        """Per prompt, per step: float32 log-probabilities (positions, vocabulary)."""
        import torch

        found = []
        for prompt in prompts:
            answer, num_prompt = self._generate(prompt, max_tokens, **more)
            ids = answer.sequences[:, :-1]
            with torch.inference_mode():
                logits = self.model(ids).logits[0].float()
            rows = torch.log_softmax(logits, dim=-1)
            found.append([rows[:num_prompt], *rows[num_prompt:].split(1)])
        return found

    def get_prompt_embeddings(self, prompts: list[str]) -> list[Any]:
        stand_in.not_applicable("prompt embeddings", "HfRunner.get_prompt_embeddings")
        return []

    def generate_beam_search(
        self, prompts: list[str], beam_width: int, max_tokens: int, **_: Any
    ) -> list[tuple[list[list[int]], list[str]]]:
        found = []
        for prompt in prompts:
            beams = {"num_beams": beam_width, "num_return_sequences": beam_width}
            answer, _num = self._generate(prompt, max_tokens, **beams)
            padding = self.model.generation_config.pad_token_id
            ids = [
                [token for token in row if token != padding] for row in answer.sequences.tolist()
            ]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            found.append((ids, texts))
        return found
