# SPDX-License-Identifier: Apache-2.0
"""Hand-made cubins: valid enough for the loader, the pack tools and the driver stub, without a CUDA compiler."""

from __future__ import annotations

import struct

META_NAME = "pk_launch_meta"
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_STRTAB = 1, 2, 3
_STT_OBJECT, _STT_FUNC, _STB_GLOBAL = 1, 2, 1 << 4


def launch_meta(
    *,
    threads: int = 256,
    smem_bytes: int = 0,
    cluster: int = 1,
    min_ctas: int = 1,
    protocol: int = 0,
    args_bytes: int = 32,
    args_hash: int = 0x1234,
    roles: tuple[tuple[int, int], ...] = (),
    schema: int = 1,
) -> bytes:
    """Bytes of struct LaunchMeta (kernels_src/common/launch_meta.cuh)."""
    padded = [*roles, *[(0, 0)] * (4 - len(roles))]
    numbers = [t for t, _ in padded] + [r for _, r in padded]
    return struct.pack(
        "<8IQ8I", schema, threads, smem_bytes, cluster, min_ctas, protocol, args_bytes, 0, args_hash, *numbers
    )


def _record(attribute: int, value: bytes) -> bytes:
    return struct.pack("<BBH", 4, attribute, len(value)) + value


def fake_cubin(
    kernel: str = "pk_fake",
    *,
    sm: int = 90,
    toolkit: str = "13.0.88",
    regs: int = 40,
    stack: int = 0,
    meta: bytes | None = None,
    code: bytes = b"\0" * 64,
) -> bytes:
    """An ELF file that says it is a cubin with one kernel and one `pk_launch_meta`.

    Toolkit 12.x for sm_90 gives the older ELF ABI, like the real one. `code` fills the kernel's text section.
    """
    meta = launch_meta() if meta is None else meta
    args_bytes = struct.unpack_from("<I", meta, 24)[0] if len(meta) >= 28 else 0
    new = sm >= 100 or int(toolkit.split(".")[0]) >= 13
    strings = b"\0" + kernel.encode() + b"\0" + META_NAME.encode() + b"\0"
    symbol = struct.Struct("<IBBHQQ")
    # Section numbers as in `bodies` below: 4 is the code, 7 the constants.
    symbols = symbol.pack(0, 0, 0, 0, 0, 0)
    symbols += symbol.pack(1, _STB_GLOBAL | _STT_FUNC, 0, 4, 0, len(code))
    symbols += symbol.pack(2 + len(kernel), _STB_GLOBAL | _STT_OBJECT, 0, 7, 0, len(meta))
    common = _record(0x2F, struct.pack("<II", 1, regs)) + _record(0x11, struct.pack("<II", 1, stack))
    own = _record(0x17, struct.pack("<IHHI", 0, 0, 48, args_bytes << 18 | 0x1F000)) + _record(
        0x05, struct.pack("<III", 256, 1, 1)
    )
    note = f"Cuda compilation tools, V{toolkit}".encode() if new else b""
    bodies = [
        ("", 0, b""),
        (".shstrtab", _SHT_STRTAB, b""),
        (".strtab", _SHT_STRTAB, strings),
        (".symtab", _SHT_SYMTAB, symbols),
        (f".text.{kernel}", _SHT_PROGBITS, code),
        (".nv.info", _SHT_PROGBITS, common),
        (f".nv.info.{kernel}", _SHT_PROGBITS, own),
        (".nv.global.init", _SHT_PROGBITS, meta),
        (".note.nv.tkinfo" if new else ".note.none", _SHT_PROGBITS, note),
    ]
    names = b"".join(name.encode() + b"\0" for name, _, _ in bodies)
    bodies[1] = (".shstrtab", _SHT_STRTAB, names)
    data, headers, name_at = b"", b"", 0
    for name, kind, body in bodies:
        data += b"\0" * (-len(data) % 8)
        link = 2 if kind == _SHT_SYMTAB else 0
        size = 24 if kind == _SHT_SYMTAB else 0
        headers += struct.pack("<IIQQQQIIQQ", name_at, kind, 0, 0, 64 + len(data), len(body), link, 1, 8, size)
        data += body
        name_at += len(name) + 1
    data += b"\0" * (-len(data) % 8)
    ident = b"\x7fELF\x02\x01\x01" + (b"\x41\x08" if new else b"\x33\x07") + b"\0" * 7
    flags = (sm << 8) | 4 if new else 0x5A0000 | sm
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(data), flags, 64, 0, 0, 64, len(bodies), 1)
    return header + data + headers
