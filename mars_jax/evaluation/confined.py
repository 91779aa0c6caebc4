"""Runs one program under limits: a script for the fresh, isolated interpreter that `sandbox.run` starts.

Protocol: stdin holds a JSON line `{"token", "cpu_seconds", "memory_bytes", "report_bytes"}` and then the program; a
JSON line with the outcome goes to the file that was stdout. The program itself sees /dev/null on all three.

The confinement is a seccomp filter that *allows* what pure computation needs and answers everything else with EPERM: no
socket, no new process or thread, no signal to anyone, and no opening of a file for writing. It needs no privilege
(PR_SET_NO_NEW_PRIVS), so it is the same for root and for everyone else.
"""

import ctypes
import json
import os
import resource
import struct
import sys

EPERM = 1
SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
AUDIT_ARCH_X86_64 = 0xC000003E
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000
# struct seccomp_data: nr at 0, arch at 4, six 64-bit arguments from 16 on (low words first).
LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06

# System calls of x86-64 that a computing interpreter makes, by number.
HARMLESS = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32,
    "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96,
    "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
    "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "newfstatat": 262, "readlinkat": 267, "set_robust_list": 273, "getrandom": 318, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
TCGETS, FIOCLEX = 0x5401, 0x5451
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
# Allowed for some arguments only: (number, index of the argument, mask, allowed values of the masked low word).
CONDITIONAL = [
    (2, 1, WRITING, [0]),  # open: to read
    (257, 2, WRITING, [0]),  # openat: to read
    (16, 1, 0xFFFFFFFF, [TCGETS, FIOCLEX]),  # ioctl: isatty and close-on-exec
    (
        72,
        1,
        0xFFFFFFFF,
        [F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC],
    ),  # fcntl: not F_SETOWN, which sends signals
    (302, 0, 0xFFFFFFFF, [0]),  # prlimit64: of this process
]


def _program() -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, operand)."""
    ops = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL)]
    ops += [(LOAD, 0, 0, 0)]
    for number in HARMLESS.values():
        ops += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number, argument, mask, values in CONDITIONAL:
        check = [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask)]
        for value in values:
            check += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
        check += [(RETURN, 0, 0, REFUSE)]
        ops += [(EQUAL, 0, len(check), number), *check]
    return [*ops, (RETURN, 0, 0, REFUSE)]


def _filter_system_calls() -> None:
    ops = _program()
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *op) for op in ops))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(ops), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in [
        (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0),  # the program does not outlive whoever waits for it
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0),
    ]:
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}) failed")


def _limit_resources(order: dict) -> None:
    limits = {
        resource.RLIMIT_CPU: order["cpu_seconds"],
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_FSIZE: order["report_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: 1,  # a second lock: root is exempt from it, the filter is not
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # a `__str__` of the program's own that raises
        return type(error).__name__


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    source = sys.stdin.buffer.read().decode()
    report = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)

    outcome = {"token": order["token"], "error": None}
    _limit_resources(order)
    _filter_system_calls()
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit too: leaving early is not passing
        outcome["error"] = _describe(error)
    os.write(report, json.dumps(outcome).encode())
    os._exit(0)  # neither `atexit` nor `__del__` of the program runs


if __name__ == "__main__":
    main()
