"""Runs programs that a model wrote, where they can do no harm.

Each program gets a fresh interpreter (`-I -S`: no environment, no site-packages, nothing of ours) in its own session,
in an empty folder, behind the limits and the system call filter of `confined.py`. What is left to it is to compute, to
read files, and to say pass or fail.
"""

import json
import platform
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mars_jax.errors import UserError

CONFINED = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use. Wall-clock and CPU seconds, address space in bytes, bytes of its outcome."""

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    report_bytes: int = 1 << 16


class Outcome(NamedTuple):
    """Whether the program ran to its end without an exception, and if not, why."""

    passed: bool
    reason: str


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Run `program` to its end, an exception or a limit.

    A program passes only if its last statement was reached: `sys.exit(0)`, `os._exit(0)` and a killed process do not
    count. The code under test shares the interpreter with its tests, so it could forge a pass if it set out to; it
    cannot do more than that.
    """
    order = {
        "token": secrets.token_hex(16),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "report_bytes": limits.report_bytes,
    }
    stdin = json.dumps(order).encode() + b"\n" + program.encode(errors="replace")
    with tempfile.TemporaryDirectory(prefix="mars-jax-") as folder, tempfile.TemporaryFile() as report:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CONFINED)],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(stdin, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"ran longer than {limits.seconds:g} s")
        finally:
            child.kill()  # the filter lets it have no children
            child.wait()
        report.seek(0)
        return _outcome(report.read(), order["token"], child.returncode)


def _outcome(report: bytes, token: str, returncode: int) -> Outcome:
    last_line = report.rsplit(b"\n", 1)[-1]
    try:
        outcome = json.loads(last_line)
    except ValueError:
        return Outcome(False, f"ended early with exit status {returncode}")
    if not isinstance(outcome, dict) or outcome.get("token") != token:
        return Outcome(False, f"ended early with exit status {returncode}")
    return Outcome(outcome["error"] is None, outcome["error"] or "passed")


def check_available() -> None:
    """Raise `UserError` where programs cannot be confined, before hours of generation rather than after."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UserError(
            f"code execution needs Linux on x86-64 for its system call filter; this is {sys.platform} on "
            f"{platform.machine()}. Leave out the code tasks, or score their logged samples on such a machine"
        )
    outcome = run("pass")
    if not outcome.passed:
        raise UserError(
            f"code execution is not possible here: the confined interpreter {outcome.reason}. The usual cause is a "
            "kernel or container that refuses seccomp filters (prctl PR_SET_SECCOMP); leave out the code tasks"
        )
