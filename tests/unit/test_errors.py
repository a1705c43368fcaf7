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
