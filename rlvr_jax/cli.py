"""``rlvr-jax COMMAND``: a thin layer over the Python API."""

import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr_jax import cli_arguments, exit_codes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; errors a user can mend are one line on stderr and exit code 2."""
    parser = cli_arguments.parser()
    args, rest = parser.parse_known_args(argv)
    if rest and hasattr(args, "overrides") and all("=" in r and not r.startswith("-") for r in rest):
        args.overrides += rest  # overrides may stand behind options, where argparse no longer looks for them
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _quiet()
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: not an error of ours
        return 0
    except (ValueError, OSError, RuntimeError, ImportError) as e:
        if args.debug:
            raise
        print(f"rlvr-jax {args.command}: {type(e).__name__}: {' '.join(str(e).split())[:2000]}", file=sys.stderr)
        if not isinstance(e, ValueError | OSError):
            print("rlvr-jax: --debug shows where it happened", file=sys.stderr)
        return exit_codes.LOST if _lost(e) else exit_codes.MEND


def console() -> None:
    """The installed command. One of several processes that fails must not wait, in jax's exit handlers, for the others."""
    code = 1
    sys.unraisablehook = _unraisable
    if sys.argv[1:2] in (["train"], ["compare"]):
        # Until there is something to save, Ctrl-C is the system's: raised inside the imports of others, an exception may be swallowed.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main()
    except SystemExit as e:  # argparse
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else exit_codes.MEND
    except BaseException:
        traceback.print_exc()
    if code not in (0, exit_codes.STOPPED) and _joined():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _unraisable(found: Any) -> None:
    """A save that failed leaves callbacks of a loop that is over; their traces would bury the line that says why it failed."""
    if str(found.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(found)


def _joined() -> bool:
    """Whether this is one of several processes; asks without making jax look for devices."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def _lost(e: BaseException) -> bool:
    """Whether an error of one of several processes comes from the others or the network, as far as it can be told.

    XLA's errors begin with the name of a status; which class of Python they get depends on where they come up (ValueError too).
    """
    if type(e).__name__ == "LostProcess":
        return True
    return _joined() and re.match(r"(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|DATA_LOSS|FAILED_PRECONDITION): ", str(e)) is not None


def _quiet() -> None:
    """Settings that must precede the first import of jax and transformers; a user's own values win."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false",
                        "TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR",
                        "JAX_COMPILATION_CACHE_DIR": str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlvr_jax" / "xla")}.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


if __name__ == "__main__":
    console()
