# SPDX-License-Identifier: Apache-2.0
"""The wheel for another CPU, from a finished one: the same packs and sources, and a cross-compiled host library.

Usage: python -m build_tools.cross_wheel dist/*_x86_64.whl [--machine aarch64] [--out dist]

Cubins do not depend on the host's CPU, so everything but the host library, the tag and RECORD is the same bytes. Needs
a cross compiler named <machine>-linux-gnu-gcc. The host library links nothing, hence there is nothing for auditwheel to
repair; the inspection checks machine, NEEDED and version needs of what was made.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from build_tools import elf_shared, host_shim, inspect_wheel, wheel_zip


class CrossError(ValueError):
    """The wheel cannot be turned into one for that machine."""


def cross(wheel: Path, machine: str, out: Path, *, compiler: str | None = None) -> Path:
    """Writes the wheel for `machine` into `out`; returns its path. Equal input and compiler give equal bytes.

    Raises:
        CrossError: the wheel is not a manylinux one, is for that machine already, or lacks the host library.
        host_shim.ShimError: no cross compiler, or it failed.
    """
    found = re.fullmatch(r"(.*-py3-none-manylinux_2_28_)(\w+)\.whl", wheel.name)
    if found is None or found[2] == machine:
        raise CrossError(f"{wheel.name} is no finished wheel for a machine other than {machine}")
    members = wheel_zip.read(wheel)
    if inspect_wheel.HOST not in members:
        raise CrossError(f"{wheel.name} has no {inspect_wheel.HOST}")
    with tempfile.TemporaryDirectory(prefix="prime-kernels-cross-") as folder:
        library = host_shim.build(Path(folder, "libprime_host.so"), compiler=compiler, machine=machine)
        members[inspect_wheel.HOST] = library.read_bytes()
    built = elf_shared.read(members[inspect_wheel.HOST]).machine
    if built != machine:
        raise CrossError(f"the compiler made a library for {built}; need {machine}")
    (tags,) = (name for name in members if name.endswith(".dist-info/WHEEL"))
    members[tags] = members[tags].replace(f"-manylinux_2_28_{found[2]}".encode(), f"-manylinux_2_28_{machine}".encode())
    return wheel_zip.write(out / f"{found[1]}{machine}.whl", members)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; prints the wheel and fails if its inspection finds something."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.cross_wheel", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--machine", default="aarch64", choices=sorted(elf_shared.MACHINES.values()))
    parser.add_argument("--out", type=Path, default=host_shim.ROOT / "dist")
    parser.add_argument("--jit-only", action="store_true", help="the wheel has no packs")
    args = parser.parse_args(argv)
    try:
        made = cross(args.wheel, args.machine, args.out)
    except (CrossError, host_shim.ShimError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    problems = inspect_wheel.inspect(made, jit_only=args.jit_only)
    print("\n".join([str(made), *(f"PROBLEM {p}" for p in problems)]))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
