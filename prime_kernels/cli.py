# SPDX-License-Identifier: Apache-2.0
"""The console script: one parser, one table of verbs; each verb's code is imported when it runs.

Exit codes: 0 ok, 1 degraded or mismatch, 2 unusable here, 3 bad usage. With `--json` standard output holds one JSON
object and nothing else, also when the verb fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

import prime_kernels
from prime_kernels.errors import ArtifactError, BackendUnavailable, PrimeKernelsError, UnsupportedConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    SubParsers = argparse._SubParsersAction["_Parser"]

OK, DEGRADED, UNUSABLE, BAD_USAGE = 0, 1, 2, 3
PRECISIONS = ("bf16", "fp8", "fp8_bwd", "mxfp8")
# Verb -> module and function that runs it.
VERBS = {
    "version": "prime_kernels.cli_info:version",
    "env": "prime_kernels.cli_info:env",
    "demo": "prime_kernels.demo:run",
    "bench": "prime_kernels.bench:run",
    "trace": "prime_kernels.trace:run",
    "doctor": "prime_kernels.loader.commands:doctor",
    "check": "prime_kernels.loader.commands:check",
    "list": "prime_kernels.loader.commands:list_",
    "explain": "prime_kernels.loader.commands:explain",
    "verify": "prime_kernels.loader.commands:verify",
    "cache": "prime_kernels.loader.commands:cache",
    "warmup": "prime_kernels.loader.commands:warmup",
}


class _Parser(argparse.ArgumentParser):
    """Exits with 3 on bad usage: argparse's 2 means "unusable here" in this program."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(BAD_USAGE, f"{self.prog}: {message}\n")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


_positive.__name__ = "positive integer"


def _problem_options(parser: argparse.ArgumentParser, required: bool) -> None:
    """The layer a question is about."""
    group = parser.add_argument_group("layer")
    group.add_argument("--hidden", type=_positive, required=required, metavar="H", help="model width")
    group.add_argument("--intermediate", type=_positive, required=required, metavar="I", help="width of one expert")
    group.add_argument("--num-experts", type=_positive, required=required, metavar="E", help="experts of all ranks")
    group.add_argument("--topk", type=_positive, required=required, metavar="K", help="experts of one token")
    group.add_argument("--ep-size", type=_positive, default=1, metavar="R", help="ranks of the expert-parallel group")
    group.add_argument("--precision", choices=PRECISIONS, default="bf16")


def _verb(subparsers: SubParsers, name: str, text: str, *, inner: bool = False) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    # The default of an action below a verb would overwrite a --json given before it.
    default = argparse.SUPPRESS if inner else False
    parser.add_argument("--json", action="store_true", default=default, help="print one JSON object")
    return parser


def _add_loader_verbs(verbs: SubParsers) -> None:
    parser = _verb(verbs, "doctor", "say whether this machine can run the kernels, and why not")
    parser = _verb(verbs, "check", "say whether a GPU and driver would be served; needs neither")
    parser.add_argument("--arch", required=True, metavar="sm_90a", help="architecture to ask about")
    parser.add_argument("--driver", metavar="13.0", help="CUDA version of the driver; none: the newest")
    _problem_options(parser, required=False)
    parser = _verb(verbs, "list", "list the kernels of this installation")
    parser.add_argument("--arch", metavar="sm_90a", help="only this architecture")
    parser = _verb(verbs, "explain", "show how a kernel is chosen for a layer, candidate by candidate")
    parser.add_argument("kernel", help="kernel name, such as mega_moe")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device index")
    parser.add_argument("--arch", metavar="sm_90a", help="ask about this architecture instead of a device")
    parser.add_argument("--driver", metavar="13.0", help="CUDA version of the driver, with --arch")
    _problem_options(parser, required=False)
    parser = _verb(verbs, "verify", "check every shipped and cached kernel against its digest")
    parser = _verb(verbs, "warmup", "fill the cache with what a layer needs beyond the shipped kernels")
    parser.add_argument("--arch", metavar="sm_90a,...", help="architectures; none: those of the devices here")
    parser.add_argument("--model", metavar="FILE", help="TOML file with one [[layer]] table a layer")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="compiler processes at a time")
    _problem_options(parser, required=False)
    _add_cache_verb(verbs)


def _add_cache_verb(verbs: SubParsers) -> None:
    parser = _verb(verbs, "cache", "show and manage the cache of compiled kernels")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    for name, text in (
        ("path", "print the folder in use"),
        ("info", "print folder, owner, entries and bytes"),
        ("list", "print the entries"),
        ("prune", "remove the least recently used entries above a size"),
        ("clear", "remove all entries"),
        ("export", "write the entries into one file, for machines without a network"),
        ("import", "add the entries of an exported file"),
    ):
        action = _verb(actions, name, text, inner=True)
        if name == "prune":
            action.add_argument("--max-size", default="2G", metavar="SIZE", help="bytes, with K, M or G (default 2G)")
        if name in ("export", "import"):
            action.add_argument("file", metavar="FILE")


def _add_running_verbs(verbs: SubParsers) -> None:
    parser = _verb(verbs, "demo", "train a small layer next to plain torch and compare the loss curves")
    parser.add_argument("--steps", type=_positive, default=300, metavar="N", help="optimiser steps (default 300)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", default="prime-kernels-demo", metavar="DIR", help="folder for loss.png")
    parser = _verb(verbs, "bench", "time forward and backward of a layer on this machine")
    parser.add_argument("--tokens", type=_positive, default=4096, metavar="T", help="tokens of this rank")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--rounds", type=_positive, default=10, metavar="N", help="timed rounds (default 10)")
    _problem_options(parser, required=True)
    parser = _verb(verbs, "trace", "record what every SM does during one call")
    parser.add_argument("--shape", metavar="SHAPE", help="layer: a name such as qwen3-30b-a3b, or HxIxExK")
    parser.add_argument("--tokens", type=_positive, default=16384, metavar="T", help="tokens (default 16384)")
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    parser.add_argument("--virtual-ranks", type=_positive, default=1, metavar="R", help="ranks that share the GPU")
    parser.add_argument("--pacing", type=float, metavar="GBPS", help="GB/s of each virtual rank's transport")
    parser.add_argument("--rounds", type=_positive, default=10, metavar="N", help="timed passes (default 10)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:N")
    parser.add_argument("--out", default="prime-kernels-trace", metavar="DIR", help="folder for what is written")
    parser.add_argument("--keep-records", action="store_true", help="also write the records, for --records")
    parser.add_argument("--records", metavar="FILE", help="show a pass that was recorded before; needs no GPU")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the console script.

    Returns:
        A parser whose namespace holds `verb`, `json` and the verb's own options; bad usage exits with 3.
    """
    parser = _Parser(prog="prime-kernels", description="Fused mixture-of-experts training kernels.")
    parser.add_argument("--version", action="version", version=f"prime-kernels {prime_kernels.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    _verb(verbs, "version", "print version, commit and kernel packs")
    _verb(verbs, "env", "print what to paste into an issue; home folder and user name are redacted")
    _add_loader_verbs(verbs)
    _add_running_verbs(verbs)
    return parser


def _resolve(verb: str) -> Callable[[argparse.Namespace], int]:
    module, _, name = VERBS[verb].partition(":")
    try:
        function: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "prime_kernels":
            raise
        raise BackendUnavailable(
            f"`prime-kernels {verb}` needs the package {error.name}, which is not installed.",
            code="E08",
            facts={"verb": verb, "package": error.name},
            remedy="Run: pip install prime-kernels",
        ) from error
    return function


def exit_code(error: PrimeKernelsError) -> int:
    """Exit code for an error that ended a verb.

    Args:
        error: What was raised.

    Returns:
        3 if the question was wrong, 2 if this machine or installation cannot answer it, else 1.
    """
    if isinstance(error, UnsupportedConfig):
        return BAD_USAGE
    if isinstance(error, (BackendUnavailable, ArtifactError)):
        return UNUSABLE
    return DEGRADED


def _report(error: PrimeKernelsError, as_json: bool) -> int:
    code = exit_code(error)
    if as_json:
        result = {DEGRADED: "degraded", UNUSABLE: "unusable", BAD_USAGE: "bad usage"}[code]
        facts = json.loads(json.dumps(error.facts, default=str))
        print(json.dumps({"result": result, "codes": [error.code], "error": str(error), "facts": facts}))
    else:
        print(f"prime-kernels: {error}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 ok, 1 degraded or mismatch, 2 unusable here, 3 bad usage.

    Raises:
        SystemExit: For --help and --version (0) and for arguments that do not parse (3).
    """
    args = build_parser().parse_args(argv)
    try:
        return _resolve(args.verb)(args)
    except PrimeKernelsError as error:
        return _report(error, args.json)
    except BrokenPipeError:
        # The reader (head, less) has left; python would complain again when it flushes at exit.
        sys.stderr.close()
        return OK
