#!/usr/bin/env python3
"""Render the JobSet of a training run on GKE TPU slices from one small values file, as YAML on stdout."""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = (
    "launch/gke/render.py --values launch/gke/values.yaml slice=v6e:4x4 -- "
    "--config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars"
)
ACCELERATORS = {  # generation → the node label cloud.google.com/gke-tpu-accelerator
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
WRONG_INPUT = 2  # the trainer's exit code for what no restart can mend


class ValuesError(Exception):
    """A value that the user can fix; the message names it and what was expected."""


@dataclass(frozen=True)
class Values:
    """The values file; see launch/gke/values.yaml for what each one means."""

    name: str
    namespace: str
    image: str
    slice: str
    num_slices: int
    spot: bool
    max_restarts: int
    grace_seconds: int
    ttl_seconds: int
    queue: str | None
    priority_class: str | None
    service_account: str | None
    env: dict

    def __post_init__(self):
        # JobSet adds "-slice-INDEX-INDEX" and a suffix to the pods' names, and DNS labels end at 63.
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise ValuesError(f"name={self.name}: use a-z, 0-9 and '-', at most 40, starting with a letter")
        if not re.fullmatch(r"\S+[:@]\S+", self.image):
            raise ValuesError(f"image={self.image}: expected REGISTRY/IMAGE:TAG")
        generation, _, topology = self.slice.partition(":")
        if generation not in ACCELERATORS or not re.fullmatch(r"\d+(x\d+){1,2}", topology):
            raise ValuesError(
                f"slice={self.slice}: expected GENERATION:TOPOLOGY such as v5e:16x16, "
                f"with a generation of {', '.join(ACCELERATORS)}"
            )
        for key in ("num_slices", "grace_seconds"):
            if getattr(self, key) < 1:
                raise ValuesError(f"{key}={getattr(self, key)}: must be at least 1")

    @property
    def accelerator(self) -> str:
        return ACCELERATORS[self.slice.partition(":")[0]]

    @property
    def topology(self) -> str:
        return self.slice.partition(":")[2]

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(int(side) for side in self.topology.split("x"))

    @property
    def chips_per_host(self) -> int:
        """GKE's machine types for training have 4 chips, or 1 for a slice of one chip."""
        return min(self.chips, 4)

    @property
    def hosts(self) -> int:
        """Hosts of one slice, which is also the number of its pods."""
        return self.chips // self.chips_per_host


def load_values(path: Path, overrides: list[str]) -> Values:
    """Read the file and `key=value` overrides. Raises ValuesError for keys missing, unknown or of another type."""
    from omegaconf import OmegaConf

    if not path.is_file():
        raise ValuesError(f"--values {path}: no such file")
    merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(overrides))
    tree = OmegaConf.to_container(merged, resolve=True)
    known = Values.__annotations__
    if wrong := sorted(set(tree) ^ set(known)):
        raise ValuesError(f"{path}: {', '.join(wrong)}: expected exactly the keys {', '.join(known)}")
    for key, kind in known.items():
        if not isinstance(tree[key], kind) or (isinstance(tree[key], bool) and kind is int):
            raise ValuesError(f"{path}: {key}={tree[key]!r}: expected {getattr(kind, '__name__', kind)}")
    return Values(**tree)


def check_train_args(train_args: list[str]) -> None:
    if "--config" not in train_args:
        raise ValuesError("no --config FILE after '--'")
    if not any(re.match(r"output_dir=(gs://|/)", argument) for argument in train_args):
        raise ValuesError("add output_dir=gs://BUCKET/PATH (or a mounted folder) after '--': a pod's own disk is lost")


def container(values: Values, train_args: list[str]) -> dict:
    """The trainer. GKE tells it about its slice and the others in TPU_* and MEGASCALE_* variables, which jax reads."""
    return {
        "name": "trainer",
        "image": values.image,
        "command": ["launch/worker.sh", *train_args, "mesh.distributed=true"],  # hands SIGTERM on to the trainer
        "env": [{"name": key, "value": str(value)} for key, value in values.env.items()],
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],  # libtpu's and Megascale's
        "resources": {"limits": {"google.com/tpu": values.chips_per_host}},
    }


def pod(values: Values, train_args: list[str]) -> dict:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": values.accelerator,
        "cloud.google.com/gke-tpu-topology": values.topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if values.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    spec = {
        "restartPolicy": "Never",  # one worker alone cannot rejoin the others: the JobSet restarts all of them
        "terminationGracePeriodSeconds": values.grace_seconds,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container(values, train_args)],
    }
    if values.priority_class:
        spec["priorityClassName"] = values.priority_class
    if values.service_account:
        spec["serviceAccountName"] = values.service_account
    return spec


def job(values: Values, train_args: list[str]) -> dict:
    """The Job of one slice: a pod a host, none of which is retried on its own."""
    return {
        "completionMode": "Indexed",
        "completions": values.hosts,
        "parallelism": values.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [WRONG_INPUT]},
                }
            ]
        },
        "template": {"spec": pod(values, train_args)},
    }


def job_set(values: Values, train_args: list[str]) -> dict:
    """The whole manifest: a Job a slice, each alone on its node pool, all restarted together until all succeed."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": values.name,
            "namespace": values.namespace,
            "labels": {"kueue.x-k8s.io/queue-name": values.queue} if values.queue else {},
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "ttlSecondsAfterFinished": values.ttl_seconds,
            "failurePolicy": {
                "maxRestarts": values.max_restarts,
                # The old pods are gone before new ones start: two lives never write to one output_dir.
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {"name": "slice", "replicas": values.num_slices, "template": {"spec": job(values, train_args)}}
            ],
        },
    }


def main(argv: list[str]) -> int:
    import yaml

    own, train_args = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s --values FILE [key=value …] -- --config FILE [key=value …]",
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--values", type=Path, required=True, help="the values file")
    parser.add_argument("--get", metavar="KEY", help="print one value, after overrides, instead of the manifest")
    parser.add_argument("--dry-run", action="store_true", help="changes nothing: this script only ever prints")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that differ from the file's")
    args = parser.parse_args(own)
    try:
        values = load_values(args.values, args.overrides)
        if args.get:
            print(getattr(values, args.get))
            return 0
        check_train_args(train_args)
    except ValuesError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    print(yaml.safe_dump(job_set(values, train_args), sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
