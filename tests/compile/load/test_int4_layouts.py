"""Every 4-bit format: all 16 values of each field, next to all 16 values of its neighbours.

The reference is plain Python with integers of any size, written from each format's definition.
Weights and zero points are de Bruijn sequences, shifted row by row. So every sequence of two (or
three) values occurs at every place of a packed word.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor

from pagespec.compile.load.gguf_blocks import read_blocks
from pagespec.compile.load.quantization_schemes import scheme_of
from pagespec.kernels.matmul.cpu import quantized as cpu_quantized
from pagespec.kernels.matmul.quantized.int4_packing import PackedWeight, pack
from pagespec.kernels.matmul.quantized.quantized_weight import Int4Weight, QuantizedWeight
from pagespec.kernels.native import calls as native
from pagespec.kernels.native.library import library

Rows = list[list[int]]
PER_WORD = 8
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
NUM_GROUPS = 8
NUM_INPUTS = GROUP * NUM_GROUPS


def de_bruijn(length: int) -> list[int]:
    """A cycle of the values 0 to 15 with every run of ``length`` once (Lyndon words in order)."""
    found: list[int] = []
    word = [-1]
    while word:
        word[-1] += 1
        if length % len(word) == 0:
            found += word
        word = (word * length)[:length]
        while word and word[-1] == 15:
            word.pop()
    return found


PAIRS, TRIPLES = de_bruijn(2), de_bruijn(3)


def shifted(cycle: list[int], num_rows: int, num_columns: int) -> Rows:
    """Any ``len(cycle)`` neighbours of a row, or of a column, are the whole cycle."""
    return [
        [cycle[(row + column) % len(cycle)] for column in range(num_columns)]
        for row in range(num_rows)
    ]


def transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def words_of_rows(
    rows: Rows, subtracted: int = 0, order: tuple[int, ...] = tuple(range(8))
) -> Rows:
    """Eight neighbours of a row per word of 32 bits, the first of ``order`` in the lowest bits; the
    word as a whole is less ``subtracted``, modulo 2**32; signed."""
    packed = []
    for row in rows:
        words = []
        for begin in range(0, len(row), PER_WORD):
            word = sum(row[begin + order[i]] * 16**i for i in range(PER_WORD))
            word = (word - subtracted) % 2**32
            words.append(word - 2**32 if word >= 2**31 else word)
        packed.append(words)
    return packed


def int32(rows: Rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def scales_of(num_groups: int, num_outputs: int) -> list[list[float]]:
    """``[G][N]``: numbers that float16 has."""
    numbers = random.Random(num_outputs)
    return [
        [numbers.randint(1024, 2047) / 2**14 for _ in range(num_outputs)] for _ in range(num_groups)
    ]


def formula(values: Rows, zeros: Rows, scales: list[list[float]]) -> Tensor:
    """``(q - z) * s`` ``[N, K]``, from ``values [K][N]``, zero points and scales ``[G][N]``."""
    size = len(values) // len(zeros)
    weight = [
        [(q - z) * s for q, z, s in zip(row, zeros[k // size], scales[k // size], strict=True)]
        for k, row in enumerate(values)
    ]
    return torch.tensor(weight, dtype=torch.float64).t().contiguous()


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
PACKED_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False},
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": PACKED_GROUP},
}


def awq_parts(values: Rows, zeros: Rows, scales: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": int32(words_of_rows(values, order=AWQ_OUTPUTS)),
        "qzeros": int32(words_of_rows(zeros, order=AWQ_OUTPUTS)),
        "scales": scales,
    }


def gptq_parts(subtracted: int) -> Callable[[Rows, Rows, Tensor], dict[str, Tensor]]:
    def parts(values: Rows, zeros: Rows, scales: Tensor) -> dict[str, Tensor]:
        return {
            "qweight": int32(transposed(words_of_rows(transposed(values)))),
            "qzeros": int32(words_of_rows(zeros, subtracted)),
            "scales": scales,
        }

    return parts


def packed_parts(values: Rows, zeros: Rows, scales: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": int32(words_of_rows(transposed(values))),
        "weight_zero_point": int32(transposed(words_of_rows(zeros))),
        "weight_scale": scales.t().contiguous(),
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Rows, Rows, Tensor], dict[str, Tensor]]]] = {
    "awq": (AWQ, awq_parts),
    "gptq without a name": (GPTQ, gptq_parts(0x11111111)),
    "gptq": (GPTQ | {"checkpoint_format": "gptq"}, gptq_parts(0x11111111)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_parts(0)),
    "compressed-tensors": (PACKED, packed_parts),
}


def read(format: str, values: Rows, zeros: Rows, scales: list[list[float]]) -> QuantizedWeight:
    config, encode = FORMATS[format]
    parts = encode(values, zeros, torch.tensor(scales).half())
    return scheme_of("model", config).read(parts, (len(values[0]), len(values)))


def test_the_sequences_have_every_run_of_neighbours() -> None:
    assert len(PAIRS) == 16**2
    assert {(PAIRS[i - 1], PAIRS[i]) for i in range(len(PAIRS))} == {
        (a, b) for a in range(16) for b in range(16)
    }
    assert len({tuple(TRIPLES[i - j] for j in range(3)) for i in range(16**3)}) == 16**3
    # At every place of a word, as rows are shifted by one.
    rows = shifted(PAIRS, PER_WORD, len(PAIRS))
    for place in range(PER_WORD - 1):
        at_place = {
            (row[i + place], row[i + place + 1])
            for row in rows
            for i in range(0, len(row), PER_WORD)
        }
        assert len(at_place) == 16**2


@pytest.mark.parametrize("format", FORMATS)
def test_every_pair_of_neighbours(format: str) -> None:
    values = shifted(PAIRS, NUM_INPUTS, len(PAIRS))
    # Weights and zero points run against one another.
    zeros = [row[::-1] for row in shifted(PAIRS, NUM_GROUPS, len(PAIRS))]
    scales = scales_of(NUM_GROUPS, len(PAIRS))
    weight = read(format, values, zeros, scales)
    assert torch.equal(weight.expanded().double(), formula(values, zeros, scales))


@pytest.mark.parametrize("format", FORMATS)
def test_every_three_neighbouring_zero_points(format: str) -> None:
    """What one field borrows from the next, it may have to borrow itself."""
    values = shifted([5], NUM_INPUTS, len(TRIPLES))
    zeros = shifted(TRIPLES, NUM_GROUPS, len(TRIPLES))
    scales = scales_of(NUM_GROUPS, len(TRIPLES))
    weight = read(format, values, zeros, scales)
    assert torch.equal(weight.expanded().double(), formula(values, zeros, scales))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_words_that_borrow_throughout(format: str, seed: int) -> None:
    """Whole words of 0, of 15, and of 0 but for one field; and random ones."""
    numbers = random.Random(seed)
    columns = [[fill] * PER_WORD for fill in range(16)]
    for place in range(PER_WORD):
        for value in (1, 15):
            columns.append([value if i == place else 0 for i in range(PER_WORD)])
            columns.append([0 if i == place else value for i in range(PER_WORD)])
    columns += [[numbers.choice((0, 0, 1, 15)) for _ in range(PER_WORD)] for _ in range(208)]
    row = [value for column in columns for value in column]
    zeros = [row[8 * g :] + row[: 8 * g] for g in range(NUM_GROUPS)]
    values = shifted(PAIRS, NUM_INPUTS, len(row))
    scales = scales_of(NUM_GROUPS, len(row))
    weight = read(format, values, zeros, scales)
    assert torch.equal(weight.expanded().double(), formula(values, zeros, scales))


def test_inputs_sorted_by_group_have_their_own_zero_points() -> None:
    values = shifted(PAIRS, NUM_INPUTS, len(PAIRS))
    zeros = shifted(PAIRS, NUM_GROUPS, len(PAIRS))
    scales = scales_of(NUM_GROUPS, len(PAIRS))
    groups = [k // GROUP for k in range(NUM_INPUTS)]
    random.Random(0).shuffle(groups)
    config, encode = FORMATS["gptq"]
    parts = encode(values, zeros, torch.tensor(scales).half())
    parts["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    weight = scheme_of("model", config).read(parts, (len(PAIRS), NUM_INPUTS))
    expected = formula(values, [zeros[g] for g in groups], [scales[g] for g in groups])
    assert torch.equal(weight.expanded().double(), expected)


# Blocks of a GGUF file: 32 values in 16 bytes, the first 16 of them in the lower halves.
HALF = 16


def nibbles(values: list[int]) -> bytes:
    return bytes(values[i] | values[i + HALF] << 4 for i in range(HALF))


def q4_0(rows: Rows) -> tuple[list[bytes], list[list[float]]]:
    """float16 d, 16 bytes: ``(q - 8) * d``."""
    data, weight = [], []
    for n, row in enumerate(rows):
        block, line = b"", []
        for k in range(0, len(row), GROUP):
            d = (1 + n % 7 + k // GROUP) / 64
            block += struct.pack("<e", d) + nibbles(row[k : k + GROUP])
            line += [(q - 8) * d for q in row[k : k + GROUP]]
        data.append(block)
        weight.append(line)
    return data, weight


def q4_1(rows: Rows) -> tuple[list[bytes], list[list[float]]]:
    """float16 d and m, 16 bytes: ``q * d + m``."""
    data, weight = [], []
    for n, row in enumerate(rows):
        block, line = b"", []
        for k in range(0, len(row), GROUP):
            d, m = (1 + n % 5 + k // GROUP) / 64, (n % 11 - 5) / 16
            block += struct.pack("<ee", d, m) + nibbles(row[k : k + GROUP])
            line += [q * d + m for q in row[k : k + GROUP]]
        data.append(block)
        weight.append(line)
    return data, weight


def q4_k(rows: Rows) -> tuple[list[bytes], list[list[float]]]:
    """float16 d and dmin, 8 scales and 8 minima of 6 bits in 12 bytes, 128 bytes of values:
    ``q * (d * scale) - dmin * minimum``. Scales take all of 64 values beside one another."""
    data, weight = [], []
    for n, row in enumerate(rows):
        block, line = b"", []
        for begin in range(0, len(row), 256):
            d, dmin = (1 + n % 3) / 64, (1 + n % 5) / 128
            scales = [(n + 9 * j) % 64 for j in range(8)]
            minima = [(63 - n + 5 * j * j) % 64 for j in range(8)]
            head = [scales[j] | scales[j + 4] >> 4 << 6 for j in range(4)]
            head += [minima[j] | minima[j + 4] >> 4 << 6 for j in range(4)]
            head += [scales[j + 4] & 15 | (minima[j + 4] & 15) << 4 for j in range(4)]
            block += struct.pack("<ee", d, dmin) + bytes(head)
            part = row[begin : begin + 256]
            for pair in range(0, 256, 64):
                block += bytes(part[pair + i] | part[pair + 32 + i] << 4 for i in range(32))
            line += [q * (d * scales[i // 32]) - dmin * minima[i // 32] for i, q in enumerate(part)]
        data.append(block)
        weight.append(line)
    return data, weight


@pytest.mark.parametrize(("format", "encode"), [("Q4_0", q4_0), ("Q4_1", q4_1), ("Q4_K", q4_k)])
def test_every_pair_of_neighbours_in_a_gguf_file(
    tmp_path: Path, format: str, encode: Callable[[Rows], tuple[list[bytes], list[list[float]]]]
) -> None:
    """In one byte, and in bytes beside one another."""
    rows = shifted(PAIRS, 256, 256)
    # Columns 16, or 32, apart share a byte.
    apart = 32 if format == "Q4_K" else HALF
    for row in range(256):
        for k in range(0, 256, 2 * apart):
            for i in range(apart):
                rows[row][k + i] = row >> 4
                rows[row][k + apart + i] = row + i & 15
    for made in (rows, shifted(PAIRS, 256, 256)):
        data, weight = encode(made)
        expected = torch.tensor(weight, dtype=torch.float64)
        raw = np.frombuffer(b"".join(data), np.uint8).reshape(len(data), -1)
        kind = GGMLQuantizationType[format]
        assert np.array_equal(dequantize(raw, kind).astype(np.float64), expected.numpy())
        writer = GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tensor("tensor", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        layer = torch.nn.Linear(256, 256, bias=False)
        with torch.no_grad():
            layer.weight.copy_(expected)
        blocks = read_blocks(tmp_path / "a.gguf", layer)["weight"]
        assert isinstance(blocks, Int4Weight)
        assert torch.equal(blocks.expanded().double(), expected)


def asymmetric() -> tuple[Int4Weight, Tensor]:
    values = shifted(PAIRS, NUM_INPUTS, len(PAIRS))
    zeros = shifted(PAIRS, NUM_GROUPS, len(PAIRS))
    scales = scales_of(NUM_GROUPS, len(PAIRS))
    weight = read("gptq", values, zeros, scales)
    assert isinstance(weight, Int4Weight)
    return weight, formula(values, zeros, scales)


def fields_of(packed: PackedWeight) -> Rows:
    """The values ``[N][P]`` of the words, by the order that their module's description gives."""
    rows = []
    for words in packed.words.tolist():
        row = [0] * (len(words) * PER_WORD)
        for place, word in enumerate(words):
            chunk, rest = divmod(place, 16)
            t, b = divmod(rest, 4)
            for lo in range(2):
                for h in range(4):
                    value = (word % 2**32) >> 4 * (lo * 4 + h) & 15
                    row[chunk * 128 + b * 32 + h * 8 + 2 * t + lo] = value
        rows.append(row)
    return rows


def test_every_pair_of_neighbours_in_the_words_of_a_gpu() -> None:
    weight, expected = asymmetric()
    packed = pack(weight)
    assert (packed.num_bits, packed.group, packed.has_minima) == (4, GROUP, False)
    assert packed.dtype == "float16"
    numbers = packed.numbers.tolist()  # [G][N]
    values = transposed(fields_of(packed))
    scales, zeros = (
        [[struct.unpack("<ee", struct.pack("<i", bits))[i] for bits in row] for row in numbers]
        for i in range(2)
    )
    assert {z for row in zeros for z in row} == set(range(16))
    assert torch.equal(formula(values, zeros, scales), expected)


def test_every_pair_of_neighbours_in_the_matmuls_of_a_cpu() -> None:
    """Rows with a single element: results are columns of the weight."""
    weight, expected = asymmetric()
    columns = torch.eye(NUM_INPUTS)
    results = {}
    if library() is not None:
        format = cpu_quantized.native_format(weight)
        packed, numbers = cpu_quantized.pack_native(weight, format)
        # Rows are quantised to 8 bits, of which 127 is exact.
        found = native.linear(127 * columns, packed, numbers, None, len(PAIRS), format, None)
        results["native"] = found / 127
    if cpu_quantized.reason_against() is None:
        results["torch"] = cpu_quantized.linear_int4(
            columns, *cpu_quantized.pack_int4(weight), None
        )
    assert results
    bounds = {"native": 1e-5, "torch": 2**-7}  # torch's operation rounds numbers to bfloat16
    for name, found in results.items():
        error = (found.t().double() - expected).abs().max() / expected.abs().max()
        assert error < bounds[name], name
