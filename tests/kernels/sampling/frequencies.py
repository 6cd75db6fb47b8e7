"""Print how often tokens of edited rows are drawn, next to the reference probabilities.

    python -m tests.kernels.sampling.frequencies [cuda]

Prints one line per parameter and for some combinations, with the chi-square statistic of the draws
and its p-value. With `cuda`, the GPU kernels draw.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagespec import SamplingParams
from pagespec.engine.logit_edits import LogitEdits
from pagespec.engine.plan import StepPlan
from pagespec.engine.request import RequestInfo
from pagespec.kernels.sampling.sampler import SamplingInputs, sample
from pagespec.runner.cpu.edits import edited_row
from pagespec.runner.edit_batch import EditBatch, EditPacker
from tests.support.plain_sampling import Row, edited_logits, probabilities

VOCAB, NUM_DRAWS = 67, 40_000
END_TOKEN_IDS = (11,)
PROMPT, OUTPUT = [1, 2, 3, 4, 4, 9], [5, 2, 5, 5, 60, 8]
_LEAST_EXPECTED = 8.0

WORDS = [(7,), (60, 8, 20), (8, 21), (9, 22), (5, 23)]
_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.6,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.4,
}
_BIAS: dict[str, Any] = {"logit_bias": {5: 1.5, 30: 2.0, 31: -3.0, 2: 0.7}}
_ALLOWED: dict[str, Any] = {"allowed_token_ids": [*range(0, VOCAB, 2), 5, 31]}
_CUT: dict[str, Any] = {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 2.0},
    "repetition_penalty below 1": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7},
    "logit_bias": _BIAS,
    "allowed_token_ids": _ALLOWED,
    "bad_words": {"words": WORDS},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [12, 13]},
    "min_tokens, over": {"min_tokens": 6, "stop_token_ids": [12, 13], "presence_penalty": 0.1},
    "penalties": _PENALTIES,
    "penalties and bias": {**_PENALTIES, **_BIAS},
    "penalties, temperature, top-k, top-p, min-p": {**_PENALTIES, **_CUT},
    "bias and allowed ids, top-k, top-p, min-p": {**_BIAS, **_ALLOWED, **_CUT},
    "all": {
        **_PENALTIES,
        **_BIAS,
        **_ALLOWED,
        **_CUT,
        "words": WORDS,
        "min_tokens": 9,
        "stop_token_ids": [12],
    },
}


@dataclass(frozen=True)
class Fit:
    """How draws fit probabilities.

    Attributes:
        num_impossible: draws of tokens that have no probability.
        chi_square: over cells in which enough draws are expected. p: of one as large, if they fit.
    """

    num_impossible: int
    num_cells: int
    chi_square: float
    p: float


def fit(counts: Row, expected: Row) -> Fit:
    """Counts of draws beside probabilities; rare tokens share a cell."""
    num_draws = counts.sum()
    is_rare = expected * num_draws < _LEAST_EXPECTED
    drawn = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum()) * num_draws
    keep = wanted > 0
    chi_square = float((((drawn - wanted) ** 2)[keep] / wanted[keep]).sum())
    num_cells = int(keep.sum())
    half = torch.tensor([(num_cells - 1) / 2, chi_square / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(half[0], half[1])) if num_cells > 1 else 1.0
    return Fit(int(counts[expected == 0].sum()), num_cells, chi_square, p)


def model_logits() -> Tensor:
    """Of some model; positive ones and negative ones among the tokens of the history."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(VOCAB, generator=generator) * 1.5


def run(
    case: str, device: str = "cpu", num_draws: int = NUM_DRAWS, define: Any = edited_logits
) -> Fit:
    given = dict(CASES[case])
    words = given.pop("words", [])
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": None, **given})
    logits = model_logits()
    edited = define(
        logits.double().numpy(),
        PROMPT,
        OUTPUT,
        params,
        end_token_ids=END_TOKEN_IDS,
        bad_words=words,
    )
    stops = {*END_TOKEN_IDS, *(params.stop_token_ids or ())}
    edits = LogitEdits.of(params, stops, words)
    tokens = _draw(params, edits, logits, device, num_draws)
    return fit(
        np.bincount(tokens, minlength=VOCAB).astype(np.float64), probabilities(edited, params)
    )


def _draw(
    params: SamplingParams, edits: LogitEdits | None, logits: Tensor, device: str, num_draws: int
) -> Row:
    info = RequestInfo("", len(PROMPT), params, 0, b"", True, edits=edits)
    num_known = len(PROMPT) + len(OUTPUT)
    num_rows = 1 if device == "cpu" else num_draws
    plan = StepPlan(
        step=0,
        requests=(info,) * num_rows,
        starts=(num_known - 1,) * num_rows,
        num_tokens=(1,) * num_rows,
        num_samples=(1,) * num_rows,
        token_ids=range(-1, -num_rows - 1, -1),
    )
    packer = EditPacker()
    packer.look(plan)
    batch = packer.pack(plan, VOCAB, [0] * num_rows)
    assert batch is not None
    sampling = SamplingInputs.from_lists(
        temperature=[params.temperature] * num_draws,
        top_k=[params.top_k] * num_draws,
        top_p=[params.top_p] * num_draws,
        min_p=[params.min_p] * num_draws,
        seeds=[17 * i + 5 for i in range(num_draws)],
        positions=[num_known + i % 3 for i in range(num_draws)],
    )
    if device == "cpu":
        row = edited_row(batch, 0, logits, PROMPT + OUTPUT)
        drawn: Row = sample(row.expand(num_draws, -1), sampling).numpy()
        return drawn
    return _draw_on(batch, params, logits, sampling, device)


def _draw_on(
    batch: EditBatch,
    params: SamplingParams,
    logits: Tensor,
    sampling: SamplingInputs,
    device: str,
) -> Row:
    from pagespec.kernels.sampling.edit_kernels import ChunkSizes, StagedEdits, edit_rows
    from pagespec.kernels.sampling.gumbel import sample_simple
    from pagespec.kernels.sampling.top_k_top_p import sample_truncated
    from pagespec.runner.row_params import truncated_fields

    no_masks = np.zeros((1, 1), np.int32)
    arrays = (batch.fields, batch.bias, batch.words, batch.word_ids, batch.masks, no_masks)
    staged = StagedEdits(*(torch.from_numpy(array).to(device) for array in arrays))
    history = torch.tensor([PROMPT + OUTPUT], dtype=torch.int32, device=device)
    same = logits.to(device).expand(len(batch), -1).contiguous()
    out = torch.empty(same.shape, dtype=torch.float32, device=device)
    counts = torch.empty(same.shape, dtype=torch.int32, device=device)
    edit_rows(same, staged, history, counts, out, 0, ChunkSizes(history.shape[1], 64, 64, 4))
    sampling = replace(
        sampling,
        temperature=sampling.temperature.to(device),
        seeds=sampling.seeds.to(device),
        positions=sampling.positions.to(device),
    )
    tokens = torch.zeros(len(batch), dtype=torch.int64, device=device)
    drawn = sampling.temperature, sampling.seeds, sampling.positions, tokens
    fields = torch.from_numpy(truncated_fields([params] * len(batch))).to(device)
    if fields.numel():
        sample_truncated(out, fields.reshape(-1), *drawn)
    else:
        sample_simple(out, *drawn)
    found: Row = tokens.cpu().numpy()
    return found


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(f"{NUM_DRAWS} draws on {device}")
    print(f"{'case':45} {'cells':>5} {'chi2':>8} {'p':>6} impossible")
    for case in CASES:
        found = run(case, device)
        print(
            f"{case:45} {found.num_cells:5} {found.chi_square:8.1f} {found.p:6.3f} "
            f"{found.num_impossible}"
        )


if __name__ == "__main__":
    main()
