# SPDX-License-Identifier: Apache-2.0
"""Generated entry files: the extern "C" kernel of one variant, its LaunchMeta, and the checks of its argument layout.

The argument struct is written once, in C++. This module reads its layout (build_tools/structs.py), the compiler
checks the offsets when it compiles the entry, and Python packs arguments by the field list that the pack carries:
none of the three can drift from the others.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from build_tools import structs
from build_tools.variants import KERNELS, Variant

# Compiler options that reach the code, for nvcc and NVRTC alike. The include path is added by whoever compiles.
OPTIONS = ("-std=c++20",)
META_SYMBOL = "pk_launch_meta"
_PROFILE = "#define PK_PROFILE\n"  # before the first include: switches on kernels_src/profile/timeline.cuh

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_FOREIGN = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", re.M)


class EntryError(ValueError):
    """An entry cannot be generated: a header is missing, foreign, or holds no such argument struct."""


@dataclass(frozen=True)
class Entry:
    """A generated entry: its text, the sources it includes (below kernels_src/, sorted), its argument layout."""

    variant: Variant
    text: str
    sources: tuple[str, ...]
    args: structs.Struct

    @property
    def args_hash(self) -> str:
        """16 hex digits."""
        return f"{self.args.layout_hash():016x}"

    @property
    def fields(self) -> list[list[str | int]]:
        """[name, word, count, offset] of every argument, as the pack carries them."""
        return [[f.name, f.word, f.count, f.offset] for f in self.args.fields]

    def fingerprint(self, root: Path = KERNELS) -> str:
        """64 hex digits over the entry's text, every source it includes and the options: no path, no time."""
        digest = hashlib.sha256()
        parts = [("entry", self.text.encode()), ("options", " ".join(OPTIONS).encode())]
        parts += [(name, (root / name).read_bytes()) for name in self.sources]
        for name, content in parts:
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()


def closure(header: str, root: Path = KERNELS) -> tuple[str, ...]:
    """Every file that `header` includes, itself too: paths below kernels_src/, what a file includes before the file.

    Raises:
        EntryError: a file does not exist, lies outside kernels_src/, or includes something with angle brackets.
    """
    order: list[str] = []
    seen: set[str] = set()

    def visit(path: Path, via: str) -> None:
        try:
            name = path.resolve().relative_to(root.resolve()).as_posix()
        except ValueError:
            raise EntryError(f"{via} includes {path}, which is outside kernels_src/") from None
        if name in seen:
            return
        seen.add(name)
        if not path.is_file():
            raise EntryError(f"{via} includes {name}, which does not exist")
        text = path.read_text(encoding="utf-8")
        foreign = _FOREIGN.search(text)
        if foreign:
            raise EntryError(f"kernels_src/{name} includes <{foreign[1]}>; device sources include no external header")
        for inner in _INCLUDE.findall(text):
            visit(path.parent / inner, name)
        order.append(name)

    visit(root / header, "variants.toml")
    return tuple(order)


def _checks(struct: structs.Struct) -> str:
    """static_asserts on size and offsets. NVRTC has no offsetof; its sources are the ones nvcc has checked."""
    lines = [f'static_assert(sizeof(Args) == {struct.size} && alignof(Args) == {struct.align}, "argument layout");']
    lines.append("#ifndef __CUDACC_RTC__")
    for item in struct.fields:
        lines.append(f'static_assert(__builtin_offsetof(Args, {item.name}) == {item.offset}, "argument layout");')
    return "\n".join([*lines, "#endif"])


def _text(variant: Variant, struct: structs.Struct) -> str:
    return f"""// SPDX-License-Identifier: Apache-2.0
// {variant.key}: generated from build_tools/variants.toml, never edited.
{_PROFILE if variant.profile else ""}#include "{variant.header}"
#include "common/launch_meta.cuh"

namespace prime {{
namespace {{
using Kernel = {variant.type};
using Args = Kernel::Args;
static_assert(legal(Kernel::kLaunch), "launch shape");
{_checks(struct)}
}}  // namespace
}}  // namespace prime

extern "C" {{

extern __device__ const prime::LaunchMeta {META_SYMBOL};
__device__ const prime::LaunchMeta {META_SYMBOL} =
    prime::make_launch_meta<prime::Kernel>(0x{struct.layout_hash():016x}ull);

__global__ void __launch_bounds__(prime::Kernel::kLaunch.threads, prime::Kernel::kLaunch.min_ctas)
    {variant.kernel}(const __grid_constant__ prime::Args args) {{
    prime::Kernel::run(args);
}}

}}  // extern "C"
"""


def generate(variant: Variant, root: Path = KERNELS) -> Entry:
    """The entry of a variant.

    Raises:
        EntryError: see `closure`; or no header in it declares the argument struct.
        structs.StructError: the argument struct is outside the grammar.
    """
    sources = closure(variant.header, root)
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in sources)
    struct = structs.find(text, variant.args)
    if struct is None:
        raise EntryError(
            f"{variant.key}: no plain struct {variant.args} in {', '.join(sources)}; "
            "argument structs have fields without braces, methods or base classes"
        )
    with_meta = sorted({*sources, *closure("common/launch_meta.cuh", root)})
    return Entry(variant, _text(variant, struct), tuple(with_meta), struct)
