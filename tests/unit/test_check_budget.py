# SPDX-License-Identifier: Apache-2.0
"""Each rule of check_budget fires on a small bad tree, and only there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import check_budget
from build_tools.cuda_text import functions, strip

ROOT = Path(__file__).resolve().parents[2]
C = "// SPDX-License-Identifier: Apache-2.0\n"
PY = "# SPDX-License-Identifier: Apache-2.0\n"
KERNEL = 'extern "C" __global__ void __launch_bounds__(384, 1)\nfwd(const Args args) {\n'


def lines(count: int, text: str = "f();") -> str:
    return "".join(f"    {text}\n" for _ in range(count))


def nested(depth: int) -> str:
    return "if (a) {\n" * depth + "}\n" * depth


def distinct(count: int, salt: str) -> str:
    return "".join(f"constexpr int k{salt}{i} = {i};\n" for i in range(count))


def rules(files: dict[str, str]) -> list[str]:
    return [violation.rule for violation in check_budget.check(files)]


def py_function(body_lines: int, docstring_lines: int = 0) -> str:
    doc = f'    """Say.\n{"    more" * docstring_lines}\n    """\n' if docstring_lines else ""
    return PY + "def f():\n" + doc + lines(body_lines, "g()")


BAD = {
    "header over 24 KB": ("file-size", "kernels_src/layout/a.cuh", C + f"//{'x' * 60}\n" * 400),
    "header over 600 lines": ("file-size", "kernels_src/layout/a.cuh", C + "\n" * 600),
    "line over 100 columns": ("line-length", "kernels_src/layout/a.cuh", C + "//" + "x" * 99 + "\n"),
    "ptx line over 120 columns": ("line-length", "kernels_src/ptx/a.cuh", C + "//" + "x" * 119 + "\n"),
    "kernel body of 81 lines": ("kernel-length", "kernels_src/moe/a.cu", C + KERNEL + lines(79) + "}\n"),
    "device function of 121 lines": (
        "function-length",
        "kernels_src/roles/a.cuh",
        C + "namespace prime {\n__device__ void f() {\n" + lines(119) + "}\n}\n",
    ),
    "six nested blocks": ("nesting", "kernels_src/roles/a.cuh", C + "void f() {\n" + nested(5) + "}\n"),
    "seven parameters": (
        "parameters",
        "kernels_src/roles/a.cuh",
        C + "void f(int a, T<int, 2> b, int c, int d, int e, int f, int g) {\n}\n",
    ),
    "eleven operands in ptx": (
        "parameters",
        "kernels_src/ptx/a.cuh",
        C + f"void f({', '.join(f'int a{i}' for i in range(11))}) {{\n}}\n",
    ),
    "five template parameters": (
        "template-parameters",
        "kernels_src/roles/a.cuh",
        C + "template <int A, int B, int C, int D, typename E>\nvoid f() {\n}\n",
    ),
    "asm outside ptx": ("ptx-only", "kernels_src/comm/a.cuh", C + 'void f() { asm volatile("trap;"); }\n'),
    "wgmma outside mma": ("arch-words", "kernels_src/roles/a.cuh", C + "void f() { ptx::wgmma_fence(); }\n"),
    "tcgen05 outside mma": ("arch-words", "kernels_src/comm/a.cuh", C + "void f() { tcgen05_wait(); }\n"),
    "sm90 in a ptx file that is not wgmma.cuh": ("arch-words", "kernels_src/ptx/tma.cuh", C + "int kSm90 = 1;\n"),
    "sm100 in a kernel": ("arch-words", "kernels_src/moe/a.cu", C + "using P = mma::sm100::Policy;\n"),
    "arch macro": ("arch-words", "kernels_src/layout/a.cuh", C + "#if __CUDA_ARCH__ >= 900\n#endif\n"),
    "std header": ("external-include", "kernels_src/layout/a.cuh", C + "#include <cstdint>\n"),
    "quoted header that is not ours": ("external-include", "kernels_src/layout/a.cuh", C + '#include "cute/a.hpp"\n'),
    "getenv in native code": ("environment", "kernels_src/host/a.c", C + 'int f() { return getenv("A") != 0; }\n'),
    "multicast in native code": ("multicast", "kernels_src/ptx/a.cuh", C + "void multimem_red() {\n}\n"),
    "no licence line": ("spdx", "kernels_src/ptx/a.cuh", "// prefetch\n"),
    "no licence line in markdown": ("spdx", "docs/a.md", "# Title\n"),
    "unfinished mark": ("unfinished", "docs/a.md", f"<!-- {check_budget.SPDX} -->\n{'TO' + 'DO'}: write\n"),
    "module over 12 KB": ("module-size", "prime_kernels/a.py", PY + "# a line of a comment\n" * 600),
    "test over 20 KB": ("module-size", "tests/unit/a.py", PY + "# a line of a comment\n" * 1000),
    "python function of 61 lines": ("function-length", "prime_kernels/a.py", py_function(60)),
    "python nesting of 6": (
        "nesting",
        "build_tools/a.py",
        PY + "def f():\n" + "".join(" " * 4 * i + "if a:\n" for i in range(1, 7)) + " " * 28 + "g()\n",
    ),
    "test class": ("test-class", "tests/unit/a.py", PY + "class TestThings:\n    pass\n"),
    "os.environ": ("environment", "prime_kernels/a.py", PY + "import os\nx = os.environ['A']\n"),
    "os.getenv": ("environment", "prime_kernels/moe/a.py", PY + "import os\nx = os.getenv('A')\n"),
    "from os import environ": ("environment", "prime_kernels/a.py", PY + "from os import environ\n"),
}


@pytest.mark.parametrize(("rule", "path", "text"), BAD.values(), ids=BAD.keys())
def test_a_broken_rule_is_reported_once(rule: str, path: str, text: str) -> None:
    assert rules({path: text}) == [rule]


GOOD = {
    "header of 600 lines": ("kernels_src/layout/a.cuh", C + "\n" * 599),
    "ptx line of 120 columns": ("kernels_src/ptx/a.cuh", C + "//" + "x" * 118 + "\n"),
    "kernel body of 80 lines": ("kernels_src/moe/a.cu", C + KERNEL + lines(78) + "}\n"),
    "device function of 120 lines": ("kernels_src/roles/a.cuh", C + "__device__ void f() {\n" + lines(118) + "}\n"),
    "five nested blocks": ("kernels_src/roles/a.cuh", C + "void f() {\n" + nested(4) + "}\n"),
    "asm in ptx": ("kernels_src/ptx/a.cuh", C + 'void f() { asm volatile("trap;"); }\n'),
    "asm in a comment": ("kernels_src/comm/a.cuh", C + '// no asm ("trap") here, and no wgmma\n'),
    "wgmma in mma": ("kernels_src/mma/sm90.cuh", C + "void f() { wgmma_fence(); }\n"),
    "tcgen05 in its ptx file": ("kernels_src/ptx/tcgen05.cuh", C + "void f() { tcgen05_wait(); }\n"),
    "python function of 60 lines and a long docstring": ("prime_kernels/a.py", py_function(59, docstring_lines=40)),
    "elif chain of 7": (
        "build_tools/a.py",
        PY
        + "def f(a):\n    if a == 0:\n        g()\n"
        + "".join(f"    elif a == {i}:\n        g()\n" for i in range(7)),
    ),
    "environment in settings": ("prime_kernels/settings.py", PY + "import os\nx = os.environ['A']\n"),
    "environment in a build tool": ("build_tools/a.py", PY + "import os\nx = os.environ['A']\n"),
    "environment attribute of something else": ("prime_kernels/a.py", PY + "x = report.environ\n"),
}


@pytest.mark.parametrize(("path", "text"), GOOD.values(), ids=GOOD.keys())
def test_what_is_just_allowed_is_not_reported(path: str, text: str) -> None:
    assert rules({path: text}) == []


LAYER_CASES = [
    ("ptx/a.cuh", "layout/b.cuh", False),
    ("common/a.cuh", "ptx/b.cuh", False),
    ("schedule/a.cuh", "pipeline/b.cuh", False),
    ("pipeline/a.cuh", "epilogue/b.cuh", False),
    ("comm/a.cuh", "epilogue/b.cuh", False),
    ("epilogue/a.cuh", "comm/b.cuh", True),
    ("comm/a.cuh", "pipeline/b.cuh", False),
    ("comm/a.cuh", "mma/policy.cuh", False),
    ("roles/a.cuh", "moe/b.cuh", False),
    ("roles/a.cuh", "mma/sm90.cuh", False),
    ("epilogue/a.cuh", "mma/sm90.cuh", False),
    ("pipeline/a.cuh", "mma/policy.cuh", False),
    ("unlisted/a.cuh", "common/b.cuh", False),
    ("epilogue/a.cuh", "comm/b.cuh", True),
    ("roles/a.cuh", "mma/policy.cuh", True),
    ("epilogue/a.cuh", "mma/policy.cuh", True),
    ("moe/a.cuh", "mma/sm90.cuh", True),
    ("moe/a.cuh", "roles/b.cuh", True),
    ("layout/a.cuh", "layout/b.cuh", True),
    ("layout/a.cuh", "dtype/b.cuh", True),
]


@pytest.mark.parametrize("style", ["from the root", "relative"])
@pytest.mark.parametrize(("source", "target", "allowed"), LAYER_CASES)
def test_includes_point_downward(source: str, target: str, allowed: bool, style: str) -> None:
    written = target if style == "from the root" else f"../{target}"
    files = {
        f"kernels_src/{source}": f'{C}#include "{written}"\n',
        f"kernels_src/{target}": C,
    }
    assert rules(files) == ([] if allowed else ["layering"])


def test_an_arch_word_in_a_file_name_that_is_included_is_fine() -> None:
    files = {"kernels_src/moe/a.cu": f'{C}#include "mma/sm90.cuh"\n', "kernels_src/mma/sm90.cuh": C}
    assert rules(files) == []


@pytest.mark.parametrize(("shared", "expected"), [(24, []), (25, ["overlap"])])
def test_two_headers_share_at_most_two_lines_in_five(shared: int, expected: list[str]) -> None:
    common = distinct(shared, "Common")
    files = {
        "kernels_src/mma/sm90.cuh": C + common + distinct(60 - shared, "One"),
        "kernels_src/mma/sm100.cuh": C + common + distinct(90, "Two"),
    }
    assert rules(files) == expected


@pytest.mark.parametrize(("shared", "expected"), [(19, []), (20, ["overlap"])])
def test_a_short_frame_is_no_copy(shared: int, expected: list[str]) -> None:
    files = {
        "kernels_src/epilogue/a.cuh": C + distinct(shared, "Common") + distinct(4, "One"),
        "kernels_src/epilogue/b.cuh": C + distinct(shared, "Common") + distinct(4, "Two"),
    }
    assert rules(files) == expected


def test_overlap_ignores_indentation_and_comments() -> None:
    body = distinct(30, "Common")
    files = {
        "kernels_src/comm/a.cuh": C + body,
        "kernels_src/comm/b.cuh": C + "".join(f"    {line}  // again\n" for line in body.splitlines()),
    }
    assert rules(files) == ["overlap"]


def test_functions_are_found_in_namespaces_classes_and_templates() -> None:
    text = """
namespace prime::layout {
struct Ring { int head{0}; __device__ int next() const noexcept { return head + 1; } };
enum class Kind : int { kOne, kTwo };
constexpr int kTable[] = {1, 2};
template <MoePolicy P, int N = P.plan.stages>
    requires(N > 1)
__device__ __forceinline__ auto drain(const Context<P>& ctx, int n) -> float4 {
    const auto visit = [&](int i) { return i; };
    return visit(n);
}
PK_DEVICE Ring::Ring(int h) : head(h) {}
bool operator==(const Ring& a, const Ring& b) { return a.head == b.head; }
}
"""
    found = [(f.name, f.parameters, f.template_parameters) for f in functions(text)]
    assert found == [("next", 0, 0), ("drain", 2, 2), ("Ring::Ring", 1, 0), ("operator==", 2, 0)]


def test_strip_keeps_positions_and_digit_separators() -> None:
    text = "int a = 1'000'000; /* two\nlines */ char c = '\"'; // \"end\nint b;"
    stripped = strip(text)
    assert len(stripped) == len(text)
    assert stripped.count("\n") == text.count("\n")
    assert "1'000'000" in stripped
    assert "two" not in stripped
    assert stripped.endswith("int b;")


def test_the_command_names_file_line_and_rule_and_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# Title\n")
    script = ROOT / "build_tools" / "check_budget.py"
    run = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout.startswith("docs/a.md:1: spdx: ")
    (tmp_path / "docs" / "a.md").write_text(f"<!-- {check_budget.SPDX} -->\n")
    run = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "1 files checked, 0 rules broken\n")


def test_this_repository_keeps_its_budgets() -> None:
    found = check_budget.check(check_budget.read_tree(ROOT))
    assert not found, "\n".join(map(str, found))
