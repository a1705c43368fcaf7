# SPDX-License-Identifier: Apache-2.0
"""What the documents say is true: the README's example runs, links resolve, public calls are documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prime_kernels
from build_tools.tomlfile import read_toml
from prime_kernels import cli, errors, settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"))]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_example_has_twelve_lines_and_runs(tmp_path: Path) -> None:
    example = code_blocks("python")[0]
    assert example.count("\n") == 12
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert "torch.Size([512, 256])" in run.stdout
    assert "nan" not in run.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_every_verb_variable_and_make_target_it_should() -> None:
    for name in settings._KNOWN:
        assert f"_{name}`" in README
    for verb in ("list", "explain", "check", "verify", "warmup", "env", "doctor"):
        assert verb in cli.VERBS
        assert re.search(rf"`(?:prime-kernels )?{verb}\b|^prime-kernels {verb}\b", README, re.MULTILINE)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(
        re.findall(r"(?:^|`)make ([a-z]+)\b", README + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    ) <= set(targets)


def state_of(arch: str) -> str:
    """The word for the fused layer on one architecture: that of its least advanced kernel."""
    rows = read_toml(ROOT / "build_tools" / "variants.toml")["variant"]
    built = [row for row in rows if row["facts"].get("family") == "mega_moe" and arch in row["archs"]]
    if not built:
        return "absent"
    return "supported" if all(arch in row["supported"] for row in built) else "compiled"


@pytest.mark.parametrize(("row", "archs"), [("bf16 | one GPU", ["sm_90a"]), ("any | one GPU", ["sm_100a", "sm_103a"])])
def test_the_support_table_says_what_the_variants_say(row: str, archs: list[str]) -> None:
    (line,) = [line for line in README.splitlines() if line.startswith("| `cuda`") and row in line and archs[0] in line]
    words = [cell.strip() for cell in line.strip("|").split("|")][-2:]
    for arch in archs:
        assert arch in line
        assert words == [state_of(arch), state_of(arch)]


def test_every_error_class_is_in_the_layer_page() -> None:
    page = (ROOT / "docs" / "moe.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and name != "PrimeKernelsError":
            assert f"`{name}`" in page


def test_the_version_stands_in_one_place() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for path in (*ROOT.glob("*.toml"), *(ROOT / "prime_kernels").rglob("*.py"))
        if prime_kernels.__version__ in path.read_text()
    ]
    assert found == ["prime_kernels/__init__.py"]


PUBLIC = sorted(set(prime_kernels.__all__) - {"KERNELS", "__version__", "errors"})


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_call_documents_arguments_result_and_errors(name: str) -> None:
    value = getattr(prime_kernels, name)
    value = getattr(value, "create", value)  # a runtime is made by its `create`, never by its constructor
    doc = inspect.getdoc(value) or ""
    assert len(doc.splitlines()[0]) > 10
    if not inspect.isclass(value):
        assert "Returns:" in doc
    assert "Args:" in doc
    assert "Raises:" in doc or name in {"unsupported_reason", "SwiGLU"}
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            assert re.search(rf"^\s*(?:\w+, )*{parameter.name}(?:, \w+)*:", doc, re.MULTILINE), parameter.name


def test_every_module_says_what_it_is_for() -> None:
    for folder in ("prime_kernels", "build_tools", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert not text.strip() or ast.get_docstring(ast.parse(text)), path


def test_the_check_that_ci_runs_is_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert "make test" in code_blocks("")[0]


def test_the_install_page_speaks_of_variables_codes_and_verbs_that_exist() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    variables = set(re.findall(r"PRIME_KERNELS_(\w+)", page))
    assert {"CACHE_DIR", "CACHE_RO", "CACHE_SHARED", "CACHE_DIGEST", "JIT"} <= variables <= set(settings._KNOWN)
    assert set(re.findall(r"PRIME_KERNELS_JIT=([\w-]+)", page)) <= set(settings.JIT_MODES)
    assert {"E01", "E20", "E31"} <= set(re.findall(r"\bE\d\d\b", page)) <= set(errors.CODES)
    verbs = set(re.findall(r"prime-kernels (doctor|check|warmup|cache \w+|env|[a-z]+) ", page))
    assert {"doctor", "check", "warmup", "cache export", "cache import", "cache prune"} <= verbs
    for words in verbs - {"of"}:
        assert words.split()[0] in cli.VERBS, words
    for topic in ("Which wheel?", "In containers", "Air-gapped", "Clusters with a shared home", "WSL 2"):
        assert f"## {topic}\n" in page


def test_the_commands_of_the_install_page_parse() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    lines = re.findall(r"(?:^|RUN |&& )prime-kernels ([^#\n`]+)", page, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        assert cli.build_parser().parse_args(line.split()).verb in cli.VERBS
