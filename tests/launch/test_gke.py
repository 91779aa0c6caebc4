"""Submitting to a GKE cluster: kubectl, Cluster Toolkit and XPK."""

import shlex

import pytest
import yaml
from helpers.commands import launch

TRAIN = ("--", "--config", "tests/launch/data/run.yaml", "output_dir=gs://bucket/runs/a", "data.path=x y")
CLUSTER = ("--name", "mars", "--cluster", "c", "--project", "p", "--image", "registry/mars:1")
COMMAND = (
    "launch/worker.sh --config tests/launch/data/run.yaml output_dir=gs://bucket/runs/a 'data.path=x y' "
    "mesh.distributed=true"
)


def gke(tools, command, *options):
    train = TRAIN if command == "submit" else ()
    return launch("gke/gke.sh", command, "--set", "slice=v6e:4x4", *options, *train, tools=tools)


def missing(tools):
    tools.rule("get jobset", error='jobsets "mars" not found', code=1)


def test_submit_applies_the_rendered_manifest(tools):
    missing(tools)
    result = gke(tools, "submit", "--set", "name=seven", "--set", "namespace=train", "--context", "prod")
    assert result.returncode == 0, result.stderr
    last = tools.records()[-1]
    assert last["line"] == "kubectl --context=prod --namespace=train apply --filename=-"
    rendered = yaml.safe_load(last["stdin"])
    assert (rendered["kind"], rendered["metadata"]["name"]) == ("JobSet", "seven")


@pytest.mark.parametrize("state", ["", "Completed"])
def test_submit_leaves_a_job_that_is_there(tools, state):
    tools.rule("get jobset", state)
    assert gke(tools, "submit").returncode == 0
    assert not any("apply" in call or "delete" in call for call in tools.calls())


def test_submit_replaces_a_job_that_failed(tools):
    tools.rule("get jobset", "Failed")
    assert gke(tools, "submit").returncode == 0
    assert tools.matching("delete jobset", "apply") == ["delete jobset", "apply"]


def test_submit_with_wrong_values_asks_the_cluster_nothing(tools):
    result = gke(tools, "submit", "--set", "num_slices=0")
    assert result.returncode == 2
    assert "num_slices=0" in result.stderr
    assert tools.calls() == []


def test_a_cluster_that_refuses_is_a_failure(tools):
    missing(tools)
    tools.rule("apply", error='no matches for kind "JobSet"', code=1)
    assert gke(tools, "submit").returncode == 1


@pytest.mark.parametrize(("state", "code"), [("Completed", 0), ("Failed", 1)])
def test_wait_tells_completed_from_failed(tools, state, code):
    tools.rule("get jobset", state)
    assert gke(tools, "wait").returncode == code


def test_wait_that_times_out_is_a_failure(tools):
    tools.rule("kubectl .* wait", error="timed out waiting for the condition", code=1)
    assert gke(tools, "wait", "--timeout", "1s").returncode == 1


def test_delete_waits_for_the_pods_to_save(tools):
    assert gke(tools, "delete").returncode == 0
    assert tools.calls() == [
        "kubectl --namespace=default delete jobset mars --ignore-not-found --cascade=foreground --wait"
    ]


def test_logs_come_from_every_worker(tools):
    assert gke(tools, "logs", "--lines", "5").returncode == 0
    assert "--selector=jobset.sigs.k8s.io/jobset-name=mars" in tools.calls()[0]
    assert "--tail=5" in tools.calls()[0]


def word_after(call: str, option: str) -> str:

    words = shlex.split(call)
    return words[words.index(option) + 1]


@pytest.mark.parametrize(
    ("name", "machine", "topology"),
    [
        ("v5e:16x16", "ct5lp-hightpu-4t", "16x16"),
        ("v6e:4x4", "ct6e-standard-4t", "4x4"),
        ("tpu7x:2x2x2", "tpu7x-standard-4t", "2x2x2"),
    ],
)
def test_cluster_toolkit_gets_machine_and_topology(tools, name, machine, topology):
    result = launch("gke/gcluster.sh", *CLUSTER, "--location", "us-east5", "--slice", name, *TRAIN, tools=tools)
    assert result.returncode == 0, result.stderr
    (call,) = tools.calls()
    assert call.startswith("gcluster job submit ")
    assert word_after(call, "--compute-type") == machine
    assert word_after(call, "--topology") == topology
    assert word_after(call, "--command") == COMMAND
    assert word_after(call, "--restarts") == "100"
    assert ("--gke-disable-parallel-containers" in call) == (machine == "tpu7x-standard-4t")


@pytest.mark.parametrize(
    ("name", "tpu_type"), [("v5e:16x16", "v5litepod-256"), ("v6e:4x4", "v6e-16"), ("v5p:4x4x4", "v5p-128")]
)
def test_xpk_gets_the_slice_by_its_own_name(tools, name, tpu_type):
    result = launch("gke/xpk.sh", *CLUSTER, "--zone", "us-east5-b", "--slice", name, *TRAIN, tools=tools)
    assert result.returncode == 0, result.stderr
    (call,) = tools.calls()
    assert call.startswith("xpk workload create ")
    assert word_after(call, "--tpu-type") == tpu_type
    assert word_after(call, "--command") == COMMAND
    assert word_after(call, "--termination-grace-period-seconds") == "600"
    assert "--restart-on-user-code-failure" in call


@pytest.mark.parametrize("tool", ["gcluster", "xpk"])
def test_a_refused_submission_fails(tools, tool):
    tools.rule(f"^{tool}", error="cluster c not found", code=1)
    where = ("--location", "us-east5") if tool == "gcluster" else ("--zone", "us-east5-b")
    result = launch(f"gke/{tool}.sh", *CLUSTER, *where, "--slice", "v6e:4x4", *TRAIN, tools=tools)
    assert result.returncode == 1
