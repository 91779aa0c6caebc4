"""The JobSet manifest: its Job part against Kubernetes' own schema, its JobSet fields one by one."""

import warnings

import pytest
import yaml
from helpers.commands import launch

TRAIN = ("--", "--config", "configs/x.yaml", "output_dir=gs://bucket/runs/a", "data.path=gs://bucket/chats.jsonl")


def render(*overrides: str, train: tuple[str, ...] = TRAIN):
    return launch("gke/render.py", "--values", "launch/gke/values.yaml", *overrides, *train)


def manifest(*overrides: str) -> dict:
    result = render(*overrides)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


def the_job(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def the_pod(manifest: dict) -> dict:
    return the_job(manifest)["template"]["spec"]


EVERYTHING = ("spot=true", "num_slices=2", "queue=tpu", "priority_class=high", "service_account=mars", "env.A=1")


@pytest.mark.parametrize("overrides", [(), EVERYTHING])
def test_the_job_is_what_kubernetes_accepts(overrides):
    validate = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not installed")
    rendered = manifest(*overrides)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": rendered["metadata"]["name"]},
        "spec": the_job(rendered),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate.validate(job, validate.latest_version(), strict=True)
        job["spec"]["paralellism"] = 1
        with pytest.raises(validate.ValidationError):  # the check can fail
            validate.validate(job, validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("name", "label", "topology", "hosts", "chips_per_host"),
    [
        ("v4:2x2x4", "tpu-v4-podslice", "2x2x4", 4, 4),
        ("v5e:16x16", "tpu-v5-lite-podslice", "16x16", 64, 4),
        ("v5p:4x4x4", "tpu-v5p-slice", "4x4x4", 16, 4),
        ("v6e:2x4", "tpu-v6e-slice", "2x4", 2, 4),
        ("v6e:1x1", "tpu-v6e-slice", "1x1", 1, 1),
        ("tpu7x:2x2x1", "tpu7x", "2x2x1", 1, 4),
    ],
)
def test_one_pod_a_host_on_the_right_nodes(name, label, topology, hosts, chips_per_host):
    rendered = manifest(f"slice={name}")
    assert the_job(rendered)["completions"] == the_job(rendered)["parallelism"] == hosts
    assert the_pod(rendered)["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips_per_host}
    assert the_pod(rendered)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }


def test_the_job_set():
    rendered = manifest("num_slices=3", "name=mars-7b", "namespace=train", "max_restarts=9", "queue=tpu")
    assert (rendered["apiVersion"], rendered["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert rendered["metadata"] == {
        "name": "mars-7b",
        "namespace": "train",
        "labels": {"kueue.x-k8s.io/queue-name": "tpu"},
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    }
    assert rendered["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert the_job(rendered)["completionMode"] == "Indexed"


def test_a_stopped_run_is_started_again_and_a_wrong_one_is_not():
    rendered = manifest("max_restarts=9")
    policy = rendered["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 9
    assert policy["restartStrategy"] == "BlockingRecreate"
    # Exit code 2 fails the Job for the reason PodFailurePolicy, which fails the JobSet; 75 and all others restart it.
    assert policy["rules"] == [
        {"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    rules = the_job(rendered)["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in rules] == [[2]]
    assert the_job(rendered)["backoffLimit"] == 0
    assert the_pod(rendered)["restartPolicy"] == "Never"


def test_the_worker_gets_the_signal_and_the_time_to_save():
    rendered = manifest("grace_seconds=321")
    assert the_pod(rendered)["terminationGracePeriodSeconds"] == 321
    # No shell in between: the worker is process 1 of the container and gets SIGTERM itself.
    assert the_pod(rendered)["containers"][0]["command"] == [
        "launch/worker.sh",
        "--config",
        "configs/x.yaml",
        "output_dir=gs://bucket/runs/a",
        "data.path=gs://bucket/chats.jsonl",
        "mesh.distributed=true",
    ]


def test_spot_selects_and_tolerates_spot_nodes():
    pod = the_pod(manifest("spot=true"))
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {"cloud.google.com/gke-spot", "google.com/tpu"} == {t["key"] for t in pod["tolerations"]}
    assert "cloud.google.com/gke-spot" not in the_pod(manifest())["nodeSelector"]


def test_the_environment_reaches_the_trainer_as_text():
    assert the_pod(manifest("env.LEVEL=3"))["containers"][0]["env"] == [{"name": "LEVEL", "value": "3"}]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("slice=v5e", "slice=v5e"),
        ("slice=v9:2x2", "v5e, v5p"),
        ("name=Mars_1", "name=Mars_1"),
        ("image=mars", "REGISTRY/IMAGE:TAG"),
        ("num_slices=0", "num_slices=0"),
        ("num_slices=two", "num_slices='two'"),
        ("spot=maybe", "spot='maybe'"),
        ("colour=blue", "colour"),
    ],
)
def test_wrong_values_are_named(override, named):
    result = render(override)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_without_config_or_durable_output_is_refused():
    assert "no --config" in render(train=()).stderr
    assert "output_dir=gs://" in render(train=("--", "--config", "c.yaml", "output_dir=runs/a")).stderr
