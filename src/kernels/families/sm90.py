"""Hopper (H100, H200): kernels in Gluon with TMA, warp specialisation and weights that are loaded
before the kernel in front has ended; and the formats of quantised weights that were measured."""

from __future__ import annotations

from ..arch import Implementation

_SM90 = ("sm90",)

IMPLEMENTATIONS = (
    Implementation(
        "few_rows_matmul",
        "bfloat16",
        _SM90,
        {
            "choose_tile": "linear.tiles:choose_prefetch_tile",
            "tuned_rows": "linear.tiles:tuned_prefetch_rows",
            "matmul": "linear.matmul_sm90:matmul",
        },
        needs_gluon=True,
    ),
    Implementation(
        "norm_matmul",
        "bfloat16",
        _SM90,
        {
            "serves": "linear.matmul_sm90:serves_norm",
            "matmul": "linear.matmul_sm90:norm_matmul",
        },
        needs_gluon=True,
    ),
    Implementation(
        "many_rows_matmul",
        "bfloat16",
        _SM90,
        {
            "serves": "linear.tiles:may_take_many_rows",
            "is_quicker": "linear.tiles:is_quicker_for_many_rows",
            "matmul": "linear.matmul_sm90_many:matmul_many",
        },
        needs_gluon=True,
    ),
    Implementation(
        "matmul",
        "fp8",
        _SM90,
        {
            "choose_tile": "quantized.tiles_fp8:choose_sm90_tile",
            "matmul": "quantized.matmul_fp8_sm90:matmul",
        },
        needs_gluon=True,
    ),
    Implementation(
        "gated_matmul",
        "fp8",
        _SM90,
        {
            "choose_tile": "quantized.tiles_fp8:choose_gated_tile",
            "matmul": "quantized.matmul_fp8_sm90:gated_matmul",
        },
        needs_gluon=True,
    ),
    Implementation(
        "prefill_attention",
        "",
        _SM90,
        {"launch": "attention.prefill_sm90:launch"},
        needs_gluon=True,
    ),
    Implementation(
        "latent_attention",
        "",
        _SM90,
        {
            "serves": "mla.prefill_sm90:is_served",
            "serves_singles": "mla.prefill_sm90:serves_singles",
            "launch": "mla.prefill_sm90:launch",
            "serves_decode": "mla.decode_sm90:serves",
            "launch_decode": "mla.decode_sm90:launch",
        },
        needs_gluon=True,
    ),
    # Weights that stay quantised, tried and measured there. FP8 rows need sm89 at least.
    Implementation("weights", "fp8", _SM90),
    Implementation("weights", "int4", _SM90),
    Implementation("weights", "int8", _SM90),
)
