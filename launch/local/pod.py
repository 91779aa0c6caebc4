#!/usr/bin/env python3
"""A pod on one machine: N processes with CPU devices, joined by jax.distributed, restarted until they are done.

It behaves like the schedulers of the other roads: when one worker ends early all are stopped and started again,
and each life resumes from the last checkpoint. SIGTERM stops all workers, lets them save, and exits with 75.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "launch/local/pod.py --processes 2 -- --config configs/quickstart_ar_sft.yaml output_dir=runs/pod"
DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75  # 75: EX_TEMPFAIL, as launch/worker.sh says it


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"example:\n  {EXAMPLE}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="worker processes (default 2)")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="CPU devices of each process (default 1)")
    parser.add_argument(
        "--max-failures", type=int, default=3, metavar="N", help="crashes after which to give up (default 3)"
    )
    parser.add_argument(
        "--grace", type=float, default=120.0, metavar="S", help="seconds from SIGTERM to SIGKILL (default 120)"
    )
    parser.add_argument(
        "--state", type=Path, default=Path("build/pod"), metavar="DIR", help="where worker-I.log and worker-I.pid go"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    parser.add_argument("train_args", nargs="*", metavar="-- --config FILE key=value …")
    args = parser.parse_args(argv)
    if min(args.processes, args.devices) < 1:
        parser.error(f"--processes {args.processes} --devices {args.devices}: each must be at least 1")
    if "--config" not in args.train_args:
        parser.error("no --config FILE after '--'")
    return args


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def worker_environment(args: argparse.Namespace, process: int, port: int | str) -> dict[str, str]:
    """What tells a worker who it is and where the others are."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(args.devices),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "MARS_NUM_PROCESSES": str(args.processes),
        "MARS_PROCESS_ID": str(process),
        "PYTHON": os.environ.get("PYTHON", sys.executable),
    }


def start(args: argparse.Namespace) -> list[subprocess.Popen]:
    args.state.mkdir(parents=True, exist_ok=True)
    port = free_port()
    workers = []
    for i in range(args.processes):
        with (args.state / f"worker-{i}.log").open("ab") as log:
            worker = subprocess.Popen(
                [ROOT / "launch" / "worker.sh", *args.train_args],
                env=os.environ | worker_environment(args, i, port),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that SIGKILL reaches the trainer as well
            )
        (args.state / f"worker-{i}.pid").write_text(f"{worker.pid}\n")
        workers.append(worker)
    return workers


def one_life(args: argparse.Namespace, stop_asked: list[bool]) -> dict[int, int]:
    """Run all workers to their end; returns the exit codes of those that ended early by themselves, by number.

    One that ends early, or a stop, ends them all: the others' exit codes then only tell how they took it.
    """
    workers = start(args)
    causes: dict[int, int] = {}
    deadline = None
    while any(worker.poll() is None for worker in workers):
        if deadline is None:
            causes = ended_early(workers)
            if causes or stop_asked:
                deadline = time.monotonic() + args.grace
                signal_all(workers, signal.SIGTERM)
        elif time.monotonic() > deadline:  # such as one that waits for a peer that crashed
            signal_all(workers, signal.SIGKILL)
        time.sleep(0.1)
    for i in range(args.processes):
        (args.state / f"worker-{i}.pid").unlink()
    return causes or ended_early(workers)


def ended_early(workers: list[subprocess.Popen]) -> dict[int, int]:
    return {i: worker.poll() for i, worker in enumerate(workers) if worker.poll() not in (None, DONE)}


def signal_all(workers: list[subprocess.Popen], number: int) -> None:
    """SIGTERM for the worker, which hands it on; SIGKILL for its whole group."""
    for worker in workers:
        if worker.poll() is None:
            (os.kill if number == signal.SIGTERM else os.killpg)(worker.pid, number)


def supervise(args: argparse.Namespace) -> int:
    stop_asked: list[bool] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_asked.append(True))
    failures = 0
    while True:
        causes = one_life(args, stop_asked)
        if not causes:
            print("pod: done", file=sys.stderr)
            return DONE
        ends = ", ".join(f"worker {i} ended with {code}" for i, code in causes.items())
        if stop_asked:
            print("pod: stopped; the same command resumes", file=sys.stderr)
            return STOPPED
        if WRONG_INPUT in causes.values():
            print(last_lines(args, next(i for i, code in causes.items() if code == WRONG_INPUT)), file=sys.stderr)
            return WRONG_INPUT
        if all(code == STOPPED for code in causes.values()):
            print(f"pod: preempted ({ends}); starting again", file=sys.stderr)
            continue
        failures += 1
        if failures > args.max_failures:
            print(last_lines(args, min(causes)), file=sys.stderr)
            print(f"pod: gave up after {failures} failures; logs in {args.state}", file=sys.stderr)
            return FAILED
        print(f"pod: failed ({ends}), {failures} of {args.max_failures}; starting again", file=sys.stderr)


def last_lines(args: argparse.Namespace, worker: int) -> str:
    return "\n".join((args.state / f"worker-{worker}.log").read_text(errors="replace").splitlines()[-5:])


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not args.dry_run:
        return supervise(args)
    for i in range(args.processes):
        environment = shlex.join(f"{key}={value}" for key, value in worker_environment(args, i, "PORT").items())
        command = shlex.join([str(ROOT / "launch" / "worker.sh"), *args.train_args])
        print(f"{environment} {command} >>{shlex.quote(str(args.state / f'worker-{i}.log'))} 2>&1 &")
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
