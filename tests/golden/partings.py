"""Find the first nodes of a graph whose values depend on the schedule, to explain a failed gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pagespec import LLM, SamplingParams
from pagespec.verify.stepped_engine import CaseRequest, LLMFactory, SteppedEngine

Rows = dict[str, Tensor]


class _Recorder(Interpreter):
    """Runs a graph and records one token's row of each result with one row per token. Results with
    a second dimension of the same size are left out."""

    def __init__(self, gm: GraphModule, token: int) -> None:
        super().__init__(gm)
        self._token, self._num_tokens = token, -1
        self.rows: Rows = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "placeholder":
            if "input_ids" in n.name:
                self._num_tokens = result.shape[-1]
        elif isinstance(result, Tensor) and result.shape.count(self._num_tokens) == 1:
            dim = list(result.shape).index(self._num_tokens)
            self.rows[n.name] = result.detach().select(dim, self._token).cpu().clone()
        return result


def _rows_of(make_llm: LLMFactory, prompt: tuple[int, ...], cuts: list[int]) -> list[Rows]:
    """The rows of the last token of each part of a prompt, by node; each part is one step."""
    kept: list[Rows] = []
    stepped = SteppedEngine(
        make_llm, max_num_seqs=2, enable_prefix_caching=False, overlap=False, graph_batch_sizes=[]
    )
    llm: LLM = stepped.llm
    bound: Any = llm._runner._forward
    gm = llm._runner.captured.graph
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    stepped.add(CaseRequest("parted", prompt, params, seed=1))
    for begin, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        recorder = _Recorder(gm, end - begin - 1)
        bound._function = recorder.run
        stepped.step(budget=end - begin)
        kept.append(recorder.rows)
    stepped.finish()
    stepped.close()
    return kept


def first_partings(make_llm: LLMFactory, prompt: tuple[int, ...], count: int = 6) -> list[str]:
    """The first nodes, in order of the graph, whose bits for the last token of a prompt differ
    between a prompt in chunks and the whole prompt in one step. Steps run without CUDA graphs."""
    last = len(prompt) - 1
    (whole,) = _rows_of(make_llm, prompt, [])
    found = []
    for cuts in ([last], [last - 1], [16], [*range(1, last + 1)]):
        rows = _rows_of(make_llm, prompt, cuts)[-1]
        parted = [
            f"{name} by {float((row.double() - rows[name].double()).abs().max()):.3g}"
            for name, row in whole.items()
            if name in rows and not torch.equal(row, rows[name])
        ]
        if parted:
            words = "token by token" if len(cuts) > 1 else f"cut at {cuts[0]}"
            found.append(f"{words}: {', '.join(parted[:count])} ({len(parted)} of {len(whole)})")
    return found
