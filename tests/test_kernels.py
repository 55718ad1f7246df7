"""The C++ kernels against their plain torch versions, and one order of additions for a row whatever shares its pass."""

from __future__ import annotations

import ctypes
import mmap
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwise import kernels
from draftwise.kernels import chain, decoder, loader, reference
from draftwise.kernels.packed import WeightsStruct, memory
from libraries import OTHERS

SHAPES = [(48, 576), (50, 96), (33, 272), (17, 40), (130, 1536)]
KINDS = ["q4_0", "q4_1", "q4_k", "q4_float", "q5_1", "q6_k", "q8_0", "q8_row", "q8_row_minimum", "bf16", "fp32"]


def make(kind: str, out: int, inputs: int) -> tuple[kernels.Packed, Tensor, tuple[str, str]]:
    """Packed weights, the same as a dense matrix, and the kind and scale the packing should find."""
    generator = torch.Generator().manual_seed(out * inputs)

    def floats(groups: int) -> Tensor:
        return torch.rand(out, groups, generator=generator) * 0.1 + 0.01

    def integers(low: int, high: int, width: int) -> Tensor:
        return torch.randint(low, high + 1, (out, width), generator=generator)

    def levels(groups: int, low: int, high: int) -> Tensor:
        per_slab = 256 // (inputs // groups if inputs % groups == 0 else 32)
        top = floats(-(-groups // per_slab)).half().float().repeat_interleave(per_slab, dim=1)[:, :groups]
        return top * integers(low, high, groups)

    of_32, of_16 = -(-inputs // 32), -(-inputs // 16)
    halves = floats(of_32).half().float()
    nibbles = integers(0, 15, inputs).to(torch.uint8)
    nibbles[0, 0], nibbles[0, 1] = 0, 15

    def pack(values: Tensor, scales: Tensor, minima: Tensor | None, group: int) -> tuple[kernels.Packed, Tensor]:
        dense = reference.dequantise(values, scales, minima, group=group)
        return kernels.pack_int(values, scales, minima, group=group), dense

    bytes_ = integers(-128, 127, inputs).to(torch.int8)
    sixes = integers(-32, 31, inputs).to(torch.int8)
    if kind == "q4_0":
        return *pack(nibbles, halves, -8 * halves, 32), ("int4", "half")
    if kind == "q4_1":
        return *pack(nibbles, halves, -floats(of_32).half().float(), 32), ("int4", "half")
    if kind == "q4_k":
        return *pack(nibbles, levels(of_32, 0, 63), -levels(of_32, 0, 63), 32), ("int4", "two-level")
    if kind == "q4_float":
        return *pack(nibbles, floats(of_32), -floats(of_32), 32), ("int4", "float")
    if kind == "q5_1":
        return *pack(integers(0, 31, inputs).to(torch.uint8), halves, -floats(of_32).half().float(), 32), ("int6", "half")
    if kind == "q6_k":
        scales = floats(-(-of_16 // 16)).half().float().repeat_interleave(16, dim=1)[:, :of_16] * integers(-128, 127, of_16)
        return *pack(sixes, scales, None, 16), ("int6", "two-level")
    if kind == "q8_0":
        return *pack(bytes_, halves, None, 32), ("int8", "half")
    if kind == "q8_row":
        return *pack(bytes_, floats(1), None, 0), ("int8", "none")
    if kind == "q8_row_minimum":
        return *pack(bytes_, floats(1), floats(1), 0), ("int8", "none")
    weight = torch.randn(out, inputs, generator=generator).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return kernels.pack_dense(weight), weight.float(), (kind, "none")


def close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got.double() - wanted.double()).abs().max() <= tolerance * wanted.double().abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_keeps_every_bit_in_the_smallest_form(kind, shape):
    packed, dense, (width, scale) = make(kind, *shape)
    assert (packed.kind, packed.scale) == (width, scale)
    assert packed.shape == shape
    assert torch.equal(packed.dense(), dense)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_match_and_a_row_has_one_order_of_additions(kind, shape):
    packed, dense, _ = make(kind, *shape)
    x = torch.randn(512, shape[1], generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float32):
        rows = x.to(dtype)
        whole = kernels.matmul(rows, packed, torch.float32)
        assert close(whole, reference.matmul(rows, dense, torch.float64), 3e-6)
        for count in (*range(1, 33), 63, 64, 100, 127, 128, 129, 257):
            for start in (0, 5):
                part = kernels.matmul(rows[start : start + count], packed, torch.float32)
                assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bf16", "fp32")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_bytes_round_rows_as_said_and_have_one_order_of_additions(kind, shape):
    packed, dense, _ = make(kind, *shape)
    packed = packed.in_bytes()
    rows = torch.randn(512, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[3] *= 1e4
    rows[4] = 0
    seen = reference.round_bytes(rows) if packed.multiplies_bytes else rows
    whole = kernels.matmul(rows, packed, torch.float32)
    for got, wanted in zip(whole, reference.matmul(seen, dense, torch.float64), strict=True):
        assert close(got, wanted, 5e-6) or not wanted.any()
    for count in (*range(1, 33), 63, 64, 100, 127, 128, 129, 257):
        for start in (0, 5):
            part = kernels.matmul(rows[start : start + count], packed, torch.float32)
            assert torch.equal(part, whole[start : start + count]), f"{count} rows from {start}"
    floats = rows.float()
    assert close(kernels.matmul(floats, packed), reference.matmul(floats, dense, torch.float64), 3e-6)


def test_products_of_bytes_survive_extreme_rows():
    packed, dense, _ = make("q8_0", 48, 576)
    packed = packed.in_bytes()
    rows = torch.zeros(5, 576).bfloat16()
    rows[0], rows[1], rows[2, 40], rows[3, 7] = 1e30, 1e-35, float("nan"), float("inf")
    out = kernels.matmul(rows, packed, torch.float32)
    assert out[0].isfinite().all() and close(out[0], dense.double().sum(1) * float(rows[0, 0]), 1e-3)
    assert out[1].abs().max() < 1e-30 and not out[4].any()
    assert out[2].isnan().all() and not out[3].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_go_to_their_places_in_rows_that_are_there(dtype):
    weight, x = torch.randn(90, 64), torch.randn(3, 64)
    packed = kernels.pack_dense(weight.to(dtype))
    places = torch.randperm(200)[:90].sort().values
    rows = torch.full((3, 200), -torch.inf)
    found = kernels.matmul(x, packed, torch.float32, dtype=dtype, into_NW=rows, places_O=places)
    assert found.data_ptr() == rows.data_ptr() and int(torch.isinf(rows).sum()) == 3 * 110
    assert torch.equal(rows[:, places], kernels.matmul(x.to(dtype), packed, torch.float32))


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_output_in_bf16_is_the_float32_one_rounded(kind):
    packed, _, _ = make(kind, 50, 96)
    x = torch.randn(5, 96)
    assert torch.equal(kernels.matmul(x, packed, torch.bfloat16), kernels.matmul(x, packed).bfloat16())


def test_embedding_rows_are_the_weights():
    packed, dense, _ = make("q6_k", 130, 1536)
    ids = torch.tensor([129, 0, 17, 17])
    assert torch.equal(packed.rows(ids), dense[ids])


def test_extreme_values_survive():
    values = torch.tensor([[-128, 127] * 16, [0, 1] * 16], dtype=torch.int8)
    scales = torch.tensor([[65504.0], [2.0**-24]])
    packed = kernels.pack_int8(values, scales)
    assert packed.scale == "half"
    assert torch.equal(packed.dense(), values * scales)
    x = torch.eye(32)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(kernels.matmul(x.to(dtype), packed, torch.float32), (values * scales).T)
    zeros = kernels.pack_int4(torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(16, 1), torch.zeros(16, 1))
    assert torch.equal(kernels.matmul(torch.full((3, 32), 1e30), zeros), torch.zeros(3, 16))


def test_bias_is_added_in_float32():
    packed, dense, _ = make("q4_1", 50, 96)
    bias = torch.linspace(-1, 1, 50)
    x = torch.randn(5, 96).bfloat16()
    assert close(
        kernels.matmul(x, packed.with_bias(bias), torch.float32), reference.matmul(x, dense, torch.float64) + bias, 3e-6
    )


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="an operating system without huge pages")
def test_large_weights_ask_for_huge_pages_in_memory_that_can_have_them():
    data = memory(1 << 23)
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            inside = low <= data.data_ptr() < high
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert data.data_ptr() % (1 << 21) == 0 and len(data) == 1 << 23
    assert " hg" in flags and " sh" not in flags  # shared memory has none unless the system is set up for it


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="scales are .* must be float32 \\(4, 2\\)"):
        kernels.pack_int4(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 3))
    with pytest.raises(ValueError, match="0 to 15"):
        kernels.pack_int4(torch.full((4, 64), 16, dtype=torch.uint8), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="the group is -1; it must be 16, 32, or 0"):
        kernels.pack_int8(torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 8))


@pytest.mark.parametrize("library", OTHERS)
def test_every_instruction_set_of_this_machine_computes_the_same(library):
    lib = library()
    for kind in ("q4_1", "q4_k", "q6_k", "q8_0", "bf16"):
        packed, dense, _ = make(kind, 50, 272)
        other = packed.on(lib)
        assert torch.equal(other.dense(), dense)
        x = torch.randn(40, 272).bfloat16()
        whole = kernels.matmul(x, other, torch.float32)
        assert close(whole, reference.matmul(x, dense, torch.float64), 3e-6)
        for count in (1, 2, 3, 4, 5, 7, 11):
            assert torch.equal(kernels.matmul(x[:count], other, torch.float32), whole[:count])


# building


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own and a library that compiles at once."""
    sources = tmp_path / "cpu"
    sources.mkdir()
    (sources / "kernels.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(loader, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_two_builds_at_once_compile_once(empty_cache, capfd):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(loader.load("portable").answer())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [42] * 4
    assert capfd.readouterr().err.count("compiling CPU kernels") == 1
    assert len(list(empty_cache.rglob("*.so"))) == 1


def test_a_cache_that_cannot_be_written_still_gives_kernels(empty_cache):
    empty_cache.write_text("a file where the folder should be")
    assert loader.load("portable").answer() == 42


def test_without_a_compiler_one_warning_says_what_to_install(empty_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    loader.library.cache_clear()
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler found; install g\\+\\+") as caught:
        assert loader.library("portable") is None
        assert loader.library("portable") is None
    loader.library.cache_clear()
    assert len(caught) == 1


def test_a_compiler_that_fails_is_quoted(empty_cache):
    (loader.SOURCES / "kernels.cpp").write_text("#error too old")
    with pytest.raises(loader.BuildError, match="too old"):
        loader.load("portable")
    assert not list(empty_cache.rglob("*.so"))


def test_structs_are_laid_out_alike_on_both_sides():
    lib = loader.library()
    assert lib is not None
    for name, struct in {"weights": WeightsStruct, "pass": decoder._Pass, "chain": chain._Chain}.items():
        size = getattr(lib, f"draftwise_sizeof_{name}")
        size.restype = ctypes.c_int64
        assert size() == ctypes.sizeof(struct), name
