"""What every command shares: exit codes, logging to stderr, `--debug`."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mars_jax.errors import UserError

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """An argument parser with the shared options and an example that runs, shown at the end of `--help`."""
    result = argparse.ArgumentParser(
        prog=f"python -m mars_jax.{name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    return result


def run(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Run a command; turn its errors into one line on stderr and the exit codes of the contract."""
    level = logging.DEBUG if args.debug else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("mars_jax").setLevel(level)
    try:
        command(args)
        sys.stdout.flush()
        return EXIT_DONE
    except BrokenPipeError:  # the reader of stdout went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except UserError as error:
        if args.debug:
            raise
        line = re.sub(r"\s*\n\s*", " ", str(error))  # some messages quote a library's of several lines
        print(f"error: {line}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_FAILED
    except Exception as error:
        if args.debug:
            raise
        print(f"error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        return EXIT_FAILED


def main(build: Callable[[], argparse.ArgumentParser], command, argv: Sequence[str] | None = None) -> int:
    """Parse and run; argparse itself exits with 2 on wrong arguments."""
    return run(command, build().parse_args(argv))


def keep_compiled_programs() -> None:
    """Compile for decoding once, not at every start: keep XLA's programs under `~/.cache/mars_jax`.

    JAX_COMPILATION_CACHE_DIR names another folder; empty, it keeps none.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "mars_jax"))
