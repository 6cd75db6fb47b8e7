"""Hopper (H100, H200): Gluon kernels with TMA, warp specialisation and weights that are loaded
before the preceding kernel has ended; and the formats of quantised weights that were measured."""

from __future__ import annotations

from ..arch import Implementation

_SM90 = ("sm90",)


def _in_gluon(operation: str, format: str, **functions: str) -> Implementation:
    return Implementation(operation, format, _SM90, functions, needs_gluon=True)


IMPLEMENTATIONS = (
    _in_gluon(
        "few_rows_matmul",
        "bfloat16",
        choose_tile="matmul.tiles:choose_prefetch_tile",
        tuned_rows="matmul.tiles:tuned_prefetch_rows",
        matmul="matmul.sm90.matmul_sm90:matmul",
    ),
    _in_gluon(
        "norm_matmul",
        "bfloat16",
        serves="matmul.sm90.matmul_sm90:serves_norm",
        matmul="matmul.sm90.matmul_sm90:norm_matmul",
    ),
    _in_gluon(
        "many_rows_matmul",
        "bfloat16",
        serves="matmul.tiles:may_take_many_rows",
        is_quicker="matmul.tiles:is_quicker_for_many_rows",
        matmul="matmul.sm90.matmul_sm90_many:matmul_many",
    ),
    _in_gluon(
        "matmul",
        "fp8",
        choose_tile="matmul.quantized.tiles_fp8:choose_sm90_tile",
        matmul="matmul.sm90.matmul_fp8_sm90:matmul",
    ),
    _in_gluon(
        "gated_matmul",
        "fp8",
        choose_tile="matmul.quantized.tiles_fp8:choose_gated_tile",
        matmul="matmul.sm90.matmul_fp8_sm90:gated_matmul",
    ),
    _in_gluon("prefill_attention", "", launch="attention.prefill_sm90:launch"),
    _in_gluon(
        "latent_attention",
        "",
        serves="mla.prefill_sm90:is_served",
        serves_singles="mla.prefill_sm90:serves_singles",
        launch="mla.prefill_sm90:launch",
        serves_decode="mla.decode_sm90:serves",
        launch_decode="mla.decode_sm90:launch",
    ),
    # Formats of weights that stay quantised, tested and measured there. FP8 rows need at least
    # sm89.
    *(Implementation("weights", format, _SM90) for format in ("fp8", "int4", "int8")),
)
