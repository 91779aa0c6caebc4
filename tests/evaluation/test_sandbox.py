"""Programs that attack the sandbox. Each would pass (or never end) if the wall it runs against were missing."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mars_jax.errors import UserError
from mars_jax.evaluation import sandbox
from mars_jax.evaluation.sandbox import Limits, run

QUICK = Limits(seconds=4.0, cpu_seconds=3)


def attack(program: str, limits: Limits = QUICK) -> sandbox.Outcome:
    return run(textwrap.dedent(program), limits)


def test_a_right_program_passes_and_a_wrong_one_says_why():
    assert attack("def add(a, b):\n    return a + b\nassert add(2, 3) == 5") == (True, "passed")
    assert attack("assert 1 + 1 == 3, 'no'") == (False, "AssertionError: no")
    assert attack("def f(:") == (False, "SyntaxError: invalid syntax (program, line 1)")


def test_the_standard_library_works():
    outcome = attack("""
        import bisect, collections, copy, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math
        import random, re, statistics, string, typing
        assert hashlib.md5(b"x").hexdigest() == "9dd4e461268c8034f5c8564e155c67a6"
        assert len({random.random() for _ in range(9)}) == 9
        assert datetime.datetime.now().year > 2000
    """)
    assert outcome == (True, "passed")


@pytest.mark.parametrize(
    "leave",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "exit_now = __import__('os')._exit; exit_now(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "raise KeyboardInterrupt",
        "class E(BaseException):\n    def __str__(self): raise ValueError\nraise E",
    ],
)
def test_leaving_before_the_tests_is_not_passing(leave):
    assert not attack(leave + "\nassert False").passed


def test_a_forged_report_without_the_token_does_not_pass():
    outcome = attack("""
        import os
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'\\n{"token": "guess", "error": null}')
            except OSError:
                pass
        os._exit(0)
    """)
    assert outcome == (False, "ended early with exit status 0")


def test_processes_cannot_multiply():
    # Bounded, so that a sandbox that is broken costs 256 processes and not the machine.
    outcome = attack("""
        import os
        for _ in range(8):
            os.fork()
    """)
    assert outcome.reason.startswith("PermissionError")
    for start in ["import os; os.posix_spawn('/bin/true', ['true'], {})", "import os; os.execv('/bin/true', ['true'])"]:
        assert attack(start).reason.startswith("PermissionError")
    assert attack("import subprocess; subprocess.run(['true'])").reason.startswith("PermissionError")
    assert attack("import threading; threading.Thread(target=print).start()").reason.startswith("RuntimeError")


def test_memory_is_limited():
    outcome = attack("hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))", Limits(memory_bytes=1 << 28))
    assert outcome.reason.startswith("MemoryError")


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    ],
)
def test_endless_programs_end(loop):
    start = time.monotonic()
    assert not attack(loop, Limits(seconds=1.5, cpu_seconds=1)).passed
    assert time.monotonic() - start < 4


def test_huge_output_is_swallowed():
    assert attack("print('x' * 50_000_000)\nassert True") == (True, "passed")
    outcome = attack("""
        import os
        while True:
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"x" * 100_000)
                except OSError:
                    pass
    """)
    assert not outcome.passed


@pytest.mark.parametrize(
    "write",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "open({path!r}, 'r+')",
        "import os; os.open({path!r}, os.O_RDONLY | os.O_CREAT)",
        "import os; os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, {path!r} + '2')",
        "import os; os.chmod({path!r}, 0)",
        "import os; os.symlink({path!r}, {path!r} + '3')",
        "import os; os.mkdir({path!r} + '4')",
        "import os; os.memfd_create('x')",
        "import shutil; shutil.rmtree({folder!r})",
    ],
)
def test_nothing_can_be_written(write, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    outcome = attack(write.format(path=str(victim), folder=str(tmp_path)))
    assert outcome.reason.startswith("PermissionError"), outcome
    assert [p.name for p in tmp_path.iterdir()] == ["victim"] and victim.read_text() == "precious"


def test_the_folder_is_empty_and_the_environment_bare(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = attack("""
        import os, sys
        assert os.listdir(".") == []
        assert os.getcwd() != "/" and not os.path.exists("mars_jax")
        assert "SECRET_TOKEN" not in os.environ
        assert not any("site-packages" in p for p in sys.path), sys.path
        assert not any(name.startswith(("mars_jax", "jax")) for name in sys.modules)
        try:
            import mars_jax
        except ImportError:
            pass
        else:
            raise AssertionError("ours was importable")
    """)
    assert outcome == (True, "passed")


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_is_no_network(family):
    assert attack(f"import socket; socket.socket(socket.{family})").reason.startswith("PermissionError")
    assert attack("import socket; socket.socketpair()").reason.startswith("PermissionError")


def test_nobody_else_can_be_signalled():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for target in [os.getpid(), bystander.pid, -1]:
            assert attack(f"import os; os.kill({target}, 9)").reason.startswith("PermissionError")
        assert attack("import os; os.kill(os.getppid(), 9)").reason.startswith("PermissionError")
        assert attack("import os; os.killpg(0, 9)").reason.startswith("PermissionError")
        setown = f"import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {bystander.pid})"  # signals by way of SIGIO
        assert attack(setown).reason.startswith("PermissionError")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_limits_cannot_be_raised_and_the_filter_cannot_be_undone():
    outcome = attack("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))")
    assert not outcome.passed
    outcome = attack("import ctypes\nassert ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0")
    assert outcome.reason.startswith("AssertionError")
    parent = attack("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))")
    assert parent.reason.startswith("PermissionError")


def test_a_program_dies_with_its_parent(tmp_path):
    """Killed in the middle of a run, the parent leaves no program behind."""
    repository = str(Path(sandbox.__file__).parents[2])
    code = "from mars_jax.evaluation.sandbox import run, Limits; run('import time; time.sleep(30)', Limits(seconds=60))"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=repository)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 10
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.02)
    program = Path(f"/proc/{found[0]}")
    time.sleep(0.5)  # let it reach the sleep
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while program.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not program.exists() or "\nState:\tZ" in (program / "status").read_text()


def test_it_works_without_privileges():
    """The filter needs none, so root and an ordinary user get the same walls."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}

    def usable(python):
        try:
            return (
                subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 11)"], **nobody).returncode
                == 0
            )
        except PermissionError:
            return False

    python = next(filter(usable, [sys.executable, "/usr/bin/python3"]), None)
    if python is None:
        pytest.skip("no Python >= 3.11 that an unprivileged user may execute")
    code = f"""
import runpy
run = runpy.run_path({sandbox.__file__!r})["run"]
print(run("pass").passed, run("open('x', 'w')").reason, run("import os; os.fork()").reason, sep="|")
"""
    environment = {"PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd="/", **nobody)
    refusal = "PermissionError: [Errno 1] Operation not permitted"
    assert done.stdout == f"True|{refusal}: 'x'|{refusal}\n", done


def test_unavailable_confinement_is_refused_before_any_work(monkeypatch):
    sandbox.check_available()
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(UserError, match="riscv64"):
        sandbox.check_available()


def test_a_confinement_that_fails_runs_nothing(monkeypatch, tmp_path):
    """If the filter cannot be installed, the program must not start."""
    broken = tmp_path / "confined.py"
    broken.write_text(
        Path(sandbox.CONFINED)
        .read_text()
        .replace(
            "PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2", "PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 77"
        )
    )
    monkeypatch.setattr(sandbox, "CONFINED", broken)
    assert run(f"open({str(tmp_path / 'escaped')!r}, 'w')", QUICK) == (False, "ended early with exit status 1")
    assert not (tmp_path / "escaped").exists()
    with pytest.raises(UserError, match="seccomp"):
        sandbox.check_available()
