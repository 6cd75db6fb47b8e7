"""Recorded results of nodes are read back, including which of them share memory."""

from __future__ import annotations

import torch

from pagespec.compile.capture.meta_json import ResultDecoder


def test_a_part_behind_the_recorded_whole_makes_each_whole_grow() -> None:
    decoder = ResultDecoder([], {})
    with torch.inference_mode(False), torch.no_grad():
        wholes = []
        for base in (0, 2, 4):
            whole = decoder.value("tensor", base, "float32", "cpu", [4], None, 0, False)
            part = decoder.value("tensor", base, "float32", "cpu", [4], [1], 4, False)
            assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
            wholes.append(whole)
    assert [whole.untyped_storage().nbytes() for whole in wholes] == [32, 32, 32]
    assert len({whole.untyped_storage()._cdata for whole in wholes}) == 3
