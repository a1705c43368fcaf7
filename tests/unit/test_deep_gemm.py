# SPDX-License-Identifier: Apache-2.0
"""The module with DeepGEMM's names, without a GPU: what it launches, and how it refuses what it cannot do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from build_tools.entries import generate
from build_tools.variants import read_variants
from prime_kernels import deep_gemm
from prime_kernels.deep_gemm import faults, launch, operands, options
from prime_kernels.errors import DtypeError, LaunchError, PrimeKernelsError, ShapeError, UnsupportedConfig
from prime_kernels.loader.args import RECORD, ArgsPacker
from prime_kernels.loader.manifest import ArgField

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {variant.key: variant for variant in read_variants()}
G, M, N, K = 3, 320, 192, 128
NT, NN = deep_gemm.m_grouped_bf16_gemm_nt_contiguous, deep_gemm.m_grouped_bf16_gemm_nn_contiguous
TN, MASKED = deep_gemm.k_grouped_bf16_gemm_tn_contiguous, deep_gemm.m_grouped_bf16_gemm_nt_masked


class Launches:
    """Stands in for the loader: packs every launch as the real one does, and remembers it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = []

    def load_kernel(self, key: str, *, device: int | None = None) -> Any:
        entry = generate(VARIANTS[key])
        fields = [ArgField(name, word, count, offset) for name, word, count, offset in entry.fields]
        packer = ArgsPacker(fields, entry.args.size)

        def run(*, grid: int, stream: int, args: dict[str, Any], maps: dict[str, Any] | None) -> None:
            packer.pack_into(bytearray(entry.args.size), args, key)
            packer.pack_maps_into(bytearray(RECORD.size * max(1, len(packer.map_names))), maps or {}, key)
            self.seen.append((key, grid, args, maps or {}))

        return SimpleNamespace(launch=run, packer=packer)

    @property
    def keys(self) -> list[str]:
        return [key for key, *_ in self.seen]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    spy = Launches()
    monkeypatch.setattr(launch, "load_kernel", spy.load_kernel)
    monkeypatch.setattr(operands, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(options, "_options", options._Options())
    yield spy
    faults._records.clear()
    options._present_sms.cache_clear()


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(m: int = M) -> Tensor:
    return torch.zeros(m, dtype=torch.int32)


def dims(record: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dims, strides) of a tensor map record."""
    values = RECORD.unpack(record)
    rank = values[21]
    return values[1 : 1 + rank], values[6 : 6 + rank - 1]


def test_products_of_rows_launch_the_bounds_and_one_gemm(launches: Launches) -> None:
    a, b, d, layout = bf16(M, K), bf16(G, N, K), bf16(M, N), rows_of()
    NT(a, b, d, layout)
    (_, grid, bounds, _), (_, gemm_grid, args, maps) = launches.seen
    assert launches.keys == [launch.KEYS["bounds"], launch.KEYS["nt"]]
    assert (bounds["kind"], bounds["rows"], bounds["num_groups"], grid) == (launch.Groups.ROWS, M, G, 1)
    assert bounds["groups"] == layout.data_ptr()
    assert (bounds["counts"], bounds["starts"]) == (args["counts"], args["starts"])
    assert bounds["starts"] - bounds["counts"] == 4 * G
    assert (args["k_steps"], args["split"], args["columns"], args["n_tiles"]) == (2, 2, N, 1)
    assert (args["num_experts"], gemm_grid) == (G, 132)
    assert {name: maps[name][1] for name in ("a", "b0", "out0")} == {
        "a": a.data_ptr(),
        "b0": b.data_ptr(),
        "out0": d.data_ptr(),
    }
    assert dims(maps["a"][0]) == ((K, M), (2 * K,))
    assert dims(maps["b0"][0]) == ((K, N, 1, G), (2 * K, 2 * K * N, 2 * K * N))
    assert dims(maps["out0"][0]) == ((N, M), (2 * N,))


def test_how_b_lies_in_memory_chooses_the_kernel_not_the_name_of_the_call(launches: Launches) -> None:
    a, d, layout = bf16(M, K), bf16(M, N), rows_of()
    for call, b, kernel in (
        (NT, bf16(G, N, K), "nt"),
        (NT, bf16(G, K, N).transpose(1, 2), "nn"),
        (NN, bf16(G, K, N), "nn"),
        (NN, bf16(G, N, K).transpose(1, 2), "nt"),
    ):
        launches.seen.clear()
        call(a, b, d, layout)
        assert launches.keys == [launch.KEYS["bounds"], launch.KEYS[kernel]]
        (weights, _) = launches.seen[1][3]["b0"]
        assert dims(weights)[0] == ((K, N, 1, G) if kernel == "nt" else (64, K, N // 64, G))


def test_operands_may_be_parts_of_larger_tensors(launches: Launches) -> None:
    wide_a, wide_d, many_b = bf16(M, 3 * K), bf16(M, N + 64), bf16(2 * G, N, K)
    NT(wide_a[:, K : 2 * K], many_b[::2], wide_d[:, 64:], rows_of())
    _, _, _, maps = launches.seen[1]
    assert dims(maps["a"][0]) == ((K, M), (6 * K,))
    assert dims(maps["b0"][0]) == ((K, N, 1, G), (2 * K, 4 * K * N, 4 * K * N))
    assert maps["out0"][1] == wide_d.data_ptr() + 128
    assert dims(maps["out0"][0]) == ((N, M), (2 * (N + 64),))


def test_one_row_and_one_group_have_strides_that_say_nothing(launches: Launches) -> None:
    a = torch.zeros(K, dtype=torch.bfloat16).as_strided((1, K), (7, 1))
    b = torch.zeros(N * K, dtype=torch.bfloat16).as_strided((1, N, K), (3, K, 1))
    NT(a, b, bf16(1, N), rows_of(1))
    _, _, _, maps = launches.seen[1]
    assert dims(maps["a"][0]) == ((K, 1), (2 * K,))
    assert dims(maps["b0"][0]) == ((K, N, 1, 1), (2 * K, 2 * K * N, 2 * K * N))


@pytest.mark.parametrize(("fill", "rounded"), [(True, 128), (False, 1)])
def test_ends_of_groups_are_read_with_the_alignment_that_was_set(launches: Launches, fill: bool, rounded: int) -> None:
    NT(bf16(M, K), bf16(G, N, K), bf16(M, N), ints(5, 130, 300), use_psum_layout=True, ensure_zero_padding=fill)
    NN(bf16(M, K), bf16(G, K, N), bf16(M, N), ints(5, 130, 300), "nk", True, fill)
    for _, _, args, _ in launches.seen[::2]:
        assert (args["kind"], args["align"], args["round"]) == (launch.Groups.ENDS, 128, rounded)
    deep_gemm.set_mk_alignment_for_contiguous_layout(192)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 192
    NT(bf16(M, K), bf16(G, N, K), bf16(M, N), ints(5, 130, 300), use_psum_layout=True)
    assert (launches.seen[-2][2]["align"], launches.seen[-2][2]["round"]) == (192, 192)


def test_groups_with_places_are_one_long_list_of_rows(launches: Launches) -> None:
    MASKED(bf16(G, 128, K), bf16(G, N, K), bf16(G, 128, N), ints(0, 128, 5), 44)
    (_, _, bounds, _), (key, _, _, maps) = launches.seen
    assert (bounds["kind"], bounds["rows"]) == (launch.Groups.PLACES, 128)
    assert key == launch.KEYS["nt"]
    assert dims(maps["a"][0])[0] == (K, G * 128)
    assert dims(maps["out0"][0])[0] == (N, G * 128)


@pytest.mark.parametrize(
    ("dtype", "add", "key"),
    [(torch.float32, True, "tn_add"), (torch.float32, False, "tn_fp32"), (torch.bfloat16, False, "tn_bf16")],
)
def test_weight_gradients_choose_the_kernel_by_dtype_and_c(
    launches: Launches, dtype: torch.dtype, add: bool, key: str
) -> None:
    a, b, d = bf16(M, K), bf16(M, N), torch.ones(G, K, N, dtype=dtype)
    TN(a, b, d, [64, 0, 256], ints(64, 0, 256), d if add else None)
    (_, _, bounds, _), (gemm, grid, args, maps) = launches.seen
    assert (bounds["kind"], bounds["rows"], gemm, grid) == (launch.Groups.SIZES, M, launch.KEYS[key], 132)
    assert (args["hidden"], args["intermediate"], args["do_gate_up"], args["do_down"]) == (K, N, 0, 1)
    assert (maps["a1"][1], maps["b1"][1], maps["down"][1]) == (a.data_ptr(), b.data_ptr(), d.data_ptr())
    assert dims(maps["a1"][0]) == ((64, M, K // 64, 1), (2 * K, 128, 2 * K * M))
    size = d.element_size()
    assert dims(maps["down"][0]) == ((N, K, G), (size * N, size * N * K))
    where = (d.data_ptr(), size * N, size * N * K) if add else (0, 0, 0)
    assert tuple(args.get(name, 0) for name in ("down_sum", "down_pitch", "down_matrix")) == where


def test_c_apart_from_d_is_copied_first(launches: Launches) -> None:
    c, d = torch.full((G, K, N), 3.0), torch.full((G, K, N), float("nan"))
    TN(bf16(M, K), bf16(M, N), d, None, ints(64, 0, 256), c)
    assert torch.equal(c, d)
    assert launches.keys[1] == launch.KEYS["tn_add"]


def test_nothing_to_multiply_launches_nothing(launches: Launches) -> None:
    d = bf16(0, N)
    NT(bf16(0, K), bf16(G, N, K), d, rows_of(0))
    c, overwritten = torch.full((G, K, N), 3.0), torch.full((G, K, N), float("nan"))
    TN(bf16(0, K), bf16(0, N), overwritten, [0, 0, 0], ints(0, 0, 0))
    assert not overwritten.any()
    TN(bf16(0, K), bf16(0, N), overwritten, [0, 0, 0], ints(0, 0, 0), c)
    assert torch.equal(overwritten, c)
    TN(bf16(0, K), bf16(0, N), c, [0, 0, 0], ints(0, 0, 0), c)
    assert (c == 3).all()
    assert launches.seen == []


def test_grids_stay_within_the_sms_that_were_set(launches: Launches) -> None:
    deep_gemm.set_num_sms(7)
    assert deep_gemm.get_num_sms() == 7
    NT(bf16(64 * 4096, K), bf16(G, N, K), bf16(64 * 4096, N), rows_of(64 * 4096))
    TN(bf16(M, K), bf16(M, N), torch.zeros(G, K, N), [64, 0, 256], ints(64, 0, 256))
    assert [grid for _, grid, *_ in launches.seen] == [7, 6, 1, 6]
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == 132


ROWS: dict[str, Any] = {"a": bf16(M, K), "b": bf16(G, N, K), "d": bf16(M, N), "grouped_layout": rows_of()}
PLACES: dict[str, Any] = {
    "a": bf16(G, 128, K),
    "b": bf16(G, N, K),
    "d": bf16(G, 128, N),
    "masked_m": ints(1, 2, 3),
    "expected_m": 2,
}
GRADS: dict[str, Any] = {
    "a": bf16(M, K),
    "b": bf16(M, N),
    "d": torch.zeros(G, K, N),
    "ks": [64, 0, 256],
    "grouped_layout": ints(64, 0, 256),
}
HALF = torch.float16


@pytest.mark.parametrize(
    ("call", "base", "change", "error", "words"),
    [
        (NT, ROWS, {"a": [1]}, ShapeError, "a is a list; need a tensor [M, K]"),
        (NT, ROWS, {"a": bf16(M)}, ShapeError, "a is [320]; need [M, K]"),
        (NT, ROWS, {"a": bf16(M, K).to(HALF)}, DtypeError, "a is torch.float16; need torch.bfloat16"),
        (NT, ROWS, {"b": bf16(G, N, 2 * K)}, ShapeError, "b is of K 256; need a's K 128"),
        (NN, ROWS, {"b": bf16(G, N, K)}, ShapeError, "b is of K 192; need a's K 128"),
        (NN, ROWS, {"b": bf16(K, N)}, ShapeError, "b is [128, 192]; need [G, K, N]"),
        (NT, ROWS, {"d": bf16(M, K)}, ShapeError, "d is [320, 128]; need [M, N] = [320, 192]"),
        (NT, ROWS, {"d": torch.zeros(M, N)}, DtypeError, "d is torch.float32; need torch.bfloat16"),
        (NT, ROWS, {"grouped_layout": None}, ShapeError, "grouped_layout is a NoneType"),
        (NT, ROWS, {"grouped_layout": rows_of(64)}, ShapeError, "grouped_layout is [64]; need [M] = [320]"),
        (NT, ROWS, {"grouped_layout": rows_of().long()}, DtypeError, "grouped_layout is torch.int64"),
        (NT, ROWS, {"grouped_layout": rows_of(2 * M)[::2]}, UnsupportedConfig, "grouped_layout is of stride 2"),
        (NT, ROWS, {"m_indices": rows_of()}, ShapeError, "grouped_layout is given, and so is m_indices"),
        (NT, ROWS, {"use_psum_layout": True}, ShapeError, "grouped_layout is [320]; need [G] = [3]"),
        (NT, ROWS, {"expected_m_for_psum_layout": 3}, UnsupportedConfig, "expected_m_for_psum_layout is 3 without"),
        (
            NT,
            ROWS,
            {"a": bf16(M, 96), "b": bf16(G, N, 96)},
            UnsupportedConfig,
            "K is 96; need a positive multiple of 64",
        ),
        (NT, ROWS, {"b": bf16(G, 90, K), "d": bf16(M, 90)}, UnsupportedConfig, "N is 90;"),
        (NT, ROWS, {"b": bf16(0, N, K)}, UnsupportedConfig, "the number of groups is 0; need 1 to 4096"),
        (NT, ROWS, {"a": bf16(K, M).t()}, UnsupportedConfig, "a is [320, 128] with strides [1, 320]"),
        (NT, ROWS, {"a": bf16(M, K + 1)[:, :K]}, UnsupportedConfig, "a is [320, 128] with strides [129, 1]"),
        (NT, ROWS, {"a": bf16(1, K).expand(M, K)}, UnsupportedConfig, "a is [320, 128] with strides [0, 1]"),
        (NT, ROWS, {"d": bf16(M * N + 1)[1:].view(M, N)}, UnsupportedConfig, "d is 2 bytes past a multiple of 16"),
        (NT, ROWS, {"b": bf16(G, N, 2 * K)[..., ::2]}, UnsupportedConfig, "b is"),
        (MASKED, PLACES, {"a": bf16(G, 100, K), "d": bf16(G, 100, N)}, UnsupportedConfig, "M is 100;"),
        (MASKED, PLACES, {"b": bf16(2, N, K)}, ShapeError, "b is [2, 192, 128]"),
        (MASKED, PLACES, {"d": bf16(G, 64, N)}, ShapeError, "d is [3, 64, 192]"),
        (MASKED, PLACES, {"masked_m": ints(1)}, ShapeError, "masked_m is [1]; need [G] = [3]"),
        (MASKED, PLACES, {"a": bf16(G, 256, K)[:, :128]}, UnsupportedConfig, "a is [3, 128, 128] with strides"),
        (TN, GRADS, {"b": bf16(64, N)}, ShapeError, "b is of 64 rows; need a's 320"),
        (TN, GRADS, {"d": torch.zeros(G, N, K)}, ShapeError, "d is [3, 192, 128]; need [G, M, N] = [3, 128, 192]"),
        (TN, GRADS, {"d": torch.zeros(G, K, N, dtype=HALF)}, DtypeError, "need torch.float32 or torch.bfloat16"),
        (TN, GRADS, {"ks": [64, 256]}, ShapeError, "ks is 2 numbers; need one per group, 3"),
        (TN, GRADS, {"ks": [64, 1, 255]}, ShapeError, "ks is 1 for a group; need multiples of 64"),
        (TN, GRADS, {"ks": [64, 64, 256]}, ShapeError, "ks is 384 rows in all; need a's 320"),
        (TN, GRADS, {"ks_cpu": [64, 0, 256]}, ShapeError, "ks is given, and so is ks_cpu"),
        (TN, GRADS, {"ks_tensor": ints(1)}, ShapeError, "grouped_layout is given, and so is ks_tensor"),
        (TN, GRADS, {"c": torch.zeros(G, N, K)}, ShapeError, "c is [3, 192, 128]; need d's"),
        (TN, GRADS, {"c": bf16(G, K, N)}, DtypeError, "c is torch.bfloat16; need torch.float32"),
        (
            TN,
            GRADS,
            {"d": bf16(G, K, N), "c": bf16(G, K, N)},
            UnsupportedConfig,
            "d is torch.bfloat16 with a c; need torch.float32",
        ),
        (TN, GRADS, {"a": bf16(M, 96), "d": torch.zeros(G, 96, N)}, UnsupportedConfig, "M is 96;"),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_needs_before_anything_is_launched(
    launches: Launches,
    call: Callable[..., None],
    base: dict[str, Any],
    change: dict[str, Any],
    error: type[PrimeKernelsError],
    words: str,
) -> None:
    if call is NN and "b" not in change:
        base = base | {"b": bf16(G, K, N)}
    with pytest.raises(error, match=re.escape(words)) as caught:
        call(**(base | change))
    assert type(caught.value) is error
    assert caught.value.remedy
    assert launches.seen == []


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ShapeError, match="a is on cpu; need a CUDA device"):
        NT(**ROWS)


def test_both_spellings_of_the_layout_arguments_work(launches: Launches) -> None:
    NT(ROWS["a"], ROWS["b"], ROWS["d"], m_indices=rows_of())
    TN(GRADS["a"], GRADS["b"], GRADS["d"], ks_cpu=[64, 0, 256], ks_tensor=ints(64, 0, 256))
    assert len(launches.seen) == 4


def test_positional_arguments_stand_in_deep_gemms_order() -> None:
    rows = ["a", "b", "d", "grouped_layout", "compiled_dims", "use_psum_layout", "ensure_zero_padding"]
    grads = ["a", "b", "d", "ks", "grouped_layout", "c", "compiled_dims", "use_psum_layout"]

    def positional(call: Callable[..., None]) -> list[str]:
        kinds = inspect.signature(call).parameters.values()
        return [p.name for p in kinds if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    assert positional(NT) == [*rows, "expected_m_for_psum_layout"]
    assert positional(NN) == rows
    assert positional(TN) == grads
    assert positional(MASKED) == ["a", "b", "d", "masked_m", "expected_m", "compiled_dims"]


@pytest.mark.parametrize(
    ("name", "precision", "instead"),
    [
        ("m_grouped_fp8_gemm_nt_contiguous", "fp8", "m_grouped_bf16_gemm_nt_contiguous"),
        ("k_grouped_fp8_gemm_tn_contiguous", "fp8", "k_grouped_bf16_gemm_tn_contiguous"),
        ("m_grouped_fp8_fp4_gemm_nn_contiguous", "fp8 x fp4", "m_grouped_bf16_gemm_nn_contiguous"),
        ("fp8_m_grouped_gemm_nt_masked", "fp8", "bf16_m_grouped_gemm_nt_masked"),
        ("m_grouped_fp4_gemm_nt_masked", "fp4", "m_grouped_bf16_gemm_nt_masked"),
    ],
)
def test_calls_in_another_precision_say_which_and_what_to_call(name: str, precision: str, instead: str) -> None:
    call = getattr(deep_gemm, name)
    assert call.__name__ == name
    with pytest.raises(UnsupportedConfig, match=f"{name} needs operands of precision {precision};") as caught:
        call((None, None), None, None, recipe=(1, 1, 128))
    assert caught.value.facts["precision"] == precision
    assert instead in str(caught.value)
    assert hasattr(deep_gemm, instead)


def test_every_refused_name_has_a_precision_and_unknown_names_are_attribute_errors() -> None:
    from prime_kernels.deep_gemm.precisions import OTHER_PRECISIONS

    for name in OTHER_PRECISIONS:
        with pytest.raises(UnsupportedConfig):
            getattr(deep_gemm, name)()
    with pytest.raises(AttributeError, match="has no attribute 'm_grouped_int8_gemm'"):
        _ = deep_gemm.m_grouped_int8_gemm  # type: ignore[attr-defined]
    for name in deep_gemm.__all__:
        assert callable(getattr(deep_gemm, name))


@pytest.mark.parametrize("value", [0, 1, 100, -64, True, 64.0, "128"])
def test_an_alignment_that_no_kernel_takes_is_refused(value: Any) -> None:
    before = deep_gemm.get_mk_alignment_for_contiguous_layout()
    with pytest.raises(UnsupportedConfig, match=r"new_value is .*; need a positive multiple of 64"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(value)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == before == 128
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=4, num_groups=8) == 64


@pytest.mark.parametrize("value", [1, -2, True, 2.0])
def test_too_few_sms_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedConfig, match=r"new_num_sms is .*; need 0"):
        deep_gemm.set_num_sms(value)


def test_what_a_kernel_left_behind_is_raised_once_by_the_next_call(launches: Launches) -> None:
    NT(**ROWS)
    words = faults._records[None].words  # type: ignore[index]
    assert launches.seen[0][2]["fault"] == launches.seen[1][2]["fault"] == faults._records[None].memory.data_ptr()  # type: ignore[index]
    words[4] = 12
    with pytest.raises(ShapeError, match="grouped_layout of an earlier call was wrong in 12 places"):
        NT(**ROWS)
    NT(**ROWS)
    words[0], words[1] = 1, 17
    with pytest.raises(LaunchError, match=r"gave up after 20 s \(CTA 17\).*\[E44\]"):
        TN(**GRADS)
    TN(**GRADS)
    assert len(launches.seen) == 6


def test_numbers_that_stand_in_two_languages_agree() -> None:
    header = (ROOT / "kernels_src" / "moe" / "group_bounds.cuh").read_text()
    kinds = dict(re.findall(r"\bk(\w+) = (\d+),", header[: header.index("struct GroupBoundsArgs")]))
    assert {name.upper(): int(number) for name, number in kinds.items()} == {k.name: int(k) for k in launch.Groups}
    assert f"kMaxGroups = {operands.MAX_GROUPS};" in header
    assert f"kBlock = {options.BLOCK};" in header


def test_every_kernel_of_the_module_is_built() -> None:
    assert set(launch.KEYS.values()) <= set(VARIANTS)
    family = {v.facts["op"] for v in VARIANTS.values() if v.facts.get("family") == "deep_gemm"}
    assert family == {"group_bounds", "rows_nt", "rows_nn"}
