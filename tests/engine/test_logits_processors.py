"""Classes that edit logits: one object per continuation, called for each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagespec import LLM, InvalidInputError, RequestOutput, SamplingParams
from pagespec.engine.config import EngineConfig
from pagespec.engine.inputs import PromptInput
from pagespec.engine.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    ProcessorClasses,
    process_dict_updates,
)
from pagespec.engine.request import Request
from pagespec.engine.request_factory import RequestFactory
from pagespec.kernels.sampling.edit_logits import processed
from tests.support.models import tiny_model

PROMPT = [5, 6]
HERE = f"{__name__}:OnlyTarget"


def target_of(params: SamplingParams) -> int | None:
    found: int | None = (params.extra_args or {}).get("target")
    return found


class Target:
    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance(target_of(params), int | None):
            raise ValueError("target is not an int")

    def is_argmax_invariant(self) -> bool:
        return False


class OnlyTarget(Target, LogitsProcessor):
    """Keeps the logit of ``target`` plus the number of output tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        assert device == torch.device("cpu")
        assert not is_pin_memory
        self.config, self.updates = vllm_config, list[BatchUpdate | None]()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)

    def apply(self, logits: Tensor) -> Tensor:
        first = self.updates[0]
        assert first is not None
        [(index, params, prompt_ids, output_ids)] = first.added
        assert (index, prompt_ids, self.updates[1:]) == (0, PROMPT, [None] * len(output_ids))
        target = target_of(params)
        if target is None:
            return logits
        kept = torch.full_like(logits, -torch.inf)
        kept[0, target + len(output_ids)] = 0
        return kept


class Added(Target, AdapterLogitsProcessor):
    """Adds to the logit of ``target`` the numbers of tokens of the prompt and of the output."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        target = target_of(params)

        def add(prompt_ids: list[int], output_ids: list[int], row: Tensor) -> Tensor:
            row[target] += 10 * len(prompt_ids) + len(output_ids)
            return row

        return None if target is None else add


class Invariant(OnlyTarget):
    def is_argmax_invariant(self) -> bool:
        return True


def requests_of(classes: ProcessorClasses | None, **params: Any) -> list[Request]:
    factory = RequestFactory(
        None,
        vocab_size=8,
        eos_token_ids=frozenset(),
        max_model_len=64,
        seed=0,
        processors=classes,
    )
    return factory.make(PromptInput(None, list(PROMPT)), SamplingParams(**params))


def classes_of(*classes: type[LogitsProcessor]) -> ProcessorClasses:
    return ProcessorClasses(classes, "settings", torch.device("cpu"))


def edited(request: Request, output_ids: list[int]) -> list[float]:
    functions = request.info.edits.processors if request.info.edits is not None else ()
    row: list[float] = processed(torch.zeros(8), output_ids, functions).tolist()
    return row


def test_each_continuation_has_its_own_object() -> None:
    one, two = requests_of(classes_of(OnlyTarget), n=2, extra_args={"target": 3})
    assert edited(one, []).index(0) == 3
    assert edited(one, [7]).index(0) == 4
    # The other one has seen no token yet.
    assert edited(two, []).index(0) == 3
    assert edited(one, [7, 7]).index(0) == 5


def test_adapters_edit_only_the_requests_they_have_a_function_for() -> None:
    [request] = requests_of(classes_of(Added), extra_args={"target": 3})
    assert edited(request, []) == [0, 0, 0, 20, 0, 0, 0, 0]
    assert edited(request, [4]) == [0, 0, 0, 21, 0, 0, 0, 0]
    [request] = requests_of(classes_of(Added))
    assert request.info.edits is None


def test_classes_run_after_the_functions_of_the_request() -> None:
    def rising(_: list[int], row: Tensor) -> Tensor:
        return row + torch.arange(8)

    [request] = requests_of(
        classes_of(Added, OnlyTarget), logits_processors=[rising], extra_args={"target": 2}
    )
    assert request.info.edits is not None
    assert [str(one) for one in request.info.edits.processors[1:]] == ["Added", "OnlyTarget"]
    assert edited(request, []).index(0) == 2


def test_parameters_are_checked_when_the_request_is_made() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^extra_args = .*refused by OnlyTarget: target is"
    ):
        requests_of(classes_of(OnlyTarget), extra_args={"target": "a"})
    with pytest.raises(
        InvalidInputError,
        match=r"^extra_args = .*vllm_xargs over HTTP. is not supported",
    ):
        requests_of(None, extra_args={"target": 1})
    assert requests_of(None, extra_args={})
    for wrong in ("target", {1: 2}):
        with pytest.raises(InvalidInputError, match=r"^extra_args = .*must be a dict with names"):
            SamplingParams(extra_args=wrong)


def test_parameters_of_a_request_keep_their_arguments() -> None:
    params = SamplingParams(extra_args={"target": 1})
    assert params.extra_args is not None
    frozen = params.frozen()
    params.extra_args["target"] = 2  # type: ignore[index]
    assert frozen.extra_args == {"target": 1}


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (OnlyTarget, "must be a list of classes or of module:Class"),
        ("nowhere:B", "cannot be imported: No module named 'nowhere'"),
        (["nowhere:B"], "cannot be imported: No module named 'nowhere'"),
        (["json:B"], "cannot be imported: module 'json' has no attribute 'B'"),
        (["json"], "cannot be imported"),
        (["json:JSONDecoder"], "must be a subclass of LogitsProcessor"),
        ([print], "must be a subclass of LogitsProcessor"),
        ([AdapterLogitsProcessor], "must define is_argmax_invariant, new_req_logits_processor"),
    ],
)
def test_other_values_are_refused(value: Any, limit: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^logits_processors = .*{limit}"):
        EngineConfig(logits_processors=value)


def test_classes_may_be_named() -> None:
    assert EngineConfig(logits_processors=[HERE, Added]).logits_processors == (OnlyTarget, Added)
    assert EngineConfig(logits_processors=HERE).logits_processors == (OnlyTarget,)


def test_a_class_that_vllm_applies_after_the_temperature_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^logits_processors = 'Invariant': must not be"):
        classes_of(Invariant)


def test_changes_of_a_batch_are_applied_in_order() -> None:
    states = {0: "a", 1: "b", 2: "c"}
    params = SamplingParams()

    def update(size: int, removed: Any = (), added: Any = (), moved: Any = ()) -> bool:
        change = BatchUpdate(size, removed, added, moved)
        return process_dict_updates(states, change, lambda _, prompt, __: "".join(prompt or "-"))

    assert not process_dict_updates(states, None, lambda *_: None)
    assert not update(3)
    assert update(3, [1], [(1, params, ["d"], [])])
    assert states == {0: "a", 1: "d", 2: "c"}
    assert update(2, [0], (), [(2, 0, MoveDirectionality.UNIDIRECTIONAL)])
    assert states == {0: "c", 1: "d"}
    assert update(2, (), (), [(0, 1, MoveDirectionality.SWAP)])
    assert states == {0: "d", 1: "c"}
    change = BatchUpdate(2, (), [(1, params, None, [])], ())
    assert process_dict_updates(states, change, lambda *_: None)
    assert states == {0: "d"}


def test_an_engine_with_a_class() -> None:
    llm = LLM(
        tiny_model("llama", num_hidden_layers=1),
        num_blocks=40,
        enforce_eager=True,
        logits_processors=[OnlyTarget],
    )

    def generated(**params: Any) -> list[list[int]]:
        asked = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **params)
        plain = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        output, other = llm.generate([PROMPT, PROMPT], [asked, plain], use_tqdm=False)
        assert isinstance(output, RequestOutput)
        return [list(one.token_ids) for one in (*output.outputs, *other.outputs)]

    *answers, plain = generated(n=2, extra_args={"target": 9})
    assert answers == [[9, 10, 11, 12]] * 2
    assert generated()[-1] == plain != [9, 10, 11]
    with pytest.raises(InvalidInputError, match="refused by OnlyTarget"):
        generated(extra_args={"target": "x"})
