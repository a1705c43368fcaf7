# SPDX-License-Identifier: Apache-2.0
"""Errors carry a code, facts and a remedy through str, pickle and inheritance."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest

from prime_kernels import errors
from prime_kernels.errors import CODES, PrimeKernelsError

PACKAGE = Path(errors.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
VALUE_KINDS = {"UnsupportedConfig", "ShapeError"}
RUNTIME_KINDS = {
    "BackendUnavailable",
    "ConfigMismatch",
    "PeerTimeout",
    "PeerAborted",
    "StaleWeightsError",
    "RuntimeClosedError",
    "ArtifactError",
    "CompileError",
    "LaunchError",
}
_LOADING = "unit/test_loader_host.py test_what_keeps_a_kernel_from_loading_has_code_facts_and_remedy"
_CALL = "cpu/test_call_errors.py test_bad_arguments_raise_a_typed_error_that_names_them"
# The test that provokes each code and looks at code, facts and remedy.
REPRODUCED = {
    "E01": "unit/test_loader_host.py test_a_host_without_a_driver_is_e01_and_says_where_to_look",
    "E02": _LOADING,
    "E03": _LOADING,
    "E04": _LOADING,
    "E05": _LOADING,
    "E06": _LOADING,
    "E07": _LOADING,
    "E08": "unit/test_registry.py test_torch_is_judged_by_its_public_version",
    "E09": "unit/test_loader_jit.py test_without_sources_the_error_is_the_whole_trace",
    "E10": "unit/test_loader_packs.py test_a_truncated_pack_is_refused_when_it_is_opened",
    "E11": "unit/test_loader_host.py test_a_library_of_another_build_is_refused_with_both_places",
    "E12": "unit/test_loader_commands.py test_two_owners_of_the_module_are_named_with_their_places",
    "E20": "unit/test_loader_cache.py test_no_usable_directory_is_an_error_only_for_those_who_need_one",
    "E30": "unit/test_loader_jit.py test_after_warmup_means_after_the_job_said_so",
    "E31": "unit/test_loader_jit.py test_a_compile_that_is_switched_off_names_key_shipped_keys_and_the_warmup_line",
    "E32": "unit/test_loader_jit.py test_a_compile_error_shows_its_first_lines_and_keeps_the_log_private",
    "E40": "unit/test_loader_launch.py test_a_launch_that_does_not_fit_is_e40_with_what_was_needed",
    "E41": _CALL,
    "E42": _CALL,
    "E43": _LOADING,
    "E44": "unit/test_cuda_peers.py test_a_wait_inside_the_gpu_is_no_peers_fault",
    "E50": "unit/test_loader_host.py test_ranks_that_differ_are_named_by_field_and_value",
    "E51": "unit/test_loader_host.py test_pairs_that_cannot_reach_each_other_are_named_with_the_matrix",
    "E52": "unit/test_cuda_peers.py test_a_wait_for_a_peer_names_rank_peer_phase_and_seconds",
    "E53": "dist/test_abort.py test_a_rank_that_refuses_its_arguments_stops_its_peers_and_the_next_call_works",
    "E60": "unit/test_loader_host.py test_a_child_forked_after_cuda_was_initialised_is_told_to_spawn",
    "E61": "cpu/test_quantized.py test_forgetting_the_generation_is_caught_under_debug",
    "E62": "cpu/test_call_errors.py test_a_closed_runtime_refuses_calls_and_closes_twice",
    "E70": "unit/test_settings.py test_a_choice_accepts_its_values_and_empty_only",
}
CLASSES = [getattr(errors, name) for name in sorted(VALUE_KINDS | RUNTIME_KINDS)]


def test_the_module_defines_exactly_the_documented_classes() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == VALUE_KINDS | RUNTIME_KINDS | {"PrimeKernelsError", "DtypeError"}
    assert issubclass(errors.DtypeError, errors.ShapeError)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_can_be_caught_as_the_builtin_a_caller_expects(kind: type[PrimeKernelsError]) -> None:
    builtin = ValueError if kind.__name__ in VALUE_KINDS else RuntimeError
    other = RuntimeError if builtin is ValueError else ValueError
    assert issubclass(kind, PrimeKernelsError)
    assert issubclass(kind, builtin)
    assert not issubclass(kind, other)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_a_documented_default_code_of_its_own(kind: type[PrimeKernelsError]) -> None:
    assert kind("m").code in CODES
    assert [other for other in CLASSES if other.default_code == kind.default_code] == [kind]


@pytest.mark.parametrize("kind", [PrimeKernelsError, *CLASSES])
def test_code_facts_and_remedy_survive_pickle_and_copy(kind: type[PrimeKernelsError]) -> None:
    error = kind("x is 1; need 2.", code="E50", facts={"got": 1, "ranks": (0, 3)}, remedy="Pass 2.")
    for clone in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(clone) is kind
        assert (clone.message, clone.code, clone.remedy) == ("x is 1; need 2.", "E50", "Pass 2.")
        assert clone.facts == {"got": 1, "ranks": (0, 3)}
        assert str(clone) == str(error) == "x is 1; need 2. Pass 2. [E50]"


def test_without_remedy_the_text_is_message_and_code() -> None:
    error = errors.ShapeError("x has 3 columns; need 4.")
    assert str(error) == "x has 3 columns; need 4. [E42]"
    assert error.facts == {}
    assert error.remedy is None


def test_facts_are_a_copy_of_what_was_passed() -> None:
    facts: dict[str, object] = {"a": 1}
    error = errors.LaunchError("m", facts=facts)
    facts["a"] = 2
    assert error.facts == {"a": 1}


def test_every_code_has_its_form_and_every_meaning_is_its_own() -> None:
    assert all(re.fullmatch(r"E\d\d", code) for code in CODES)
    assert len(set(CODES.values())) == len(CODES)


def code_literals() -> set[str]:
    """Every string of the form Exx in the package, wherever it stands."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"E\d\d", node.value):
                found.add(node.value)
    return found


def test_every_code_the_package_uses_is_documented() -> None:
    assert code_literals() <= set(CODES)


def test_the_package_raises_no_bare_exceptions_of_its_own() -> None:
    # NotImplementedError, StopIteration and AttributeError belong to protocols; the rest hides what a caller can catch.
    banned = {"Exception", "RuntimeError", "ValueError", "AssertionError"}
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and isinstance(raised.func, ast.Name) and raised.func.id in banned:
                found.append(f"{path.relative_to(PACKAGE)}:{raised.lineno} {raised.func.id}")
    assert found == []


def test_every_code_is_reproduced_by_a_test() -> None:
    assert set(REPRODUCED) == set(CODES) - {"E00"}


@pytest.mark.parametrize("code", REPRODUCED)
def test_the_test_of_a_code_looks_at_code_facts_and_remedy(code: str) -> None:
    file, name = REPRODUCED[code].split()
    text = (TESTS / file).read_text()
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name]
    (function,) = functions
    parts = [ast.get_source_segment(text, node) or "" for node in (*function.decorator_list, function)]
    source = "\n".join(parts)
    assert f'"{code}"' in source
    assert re.search(r"\.facts\b|\[\"facts\"\]", source)
    assert re.search(r"\.remedy\b|\[\"remedy\"\]", source)
