"""Compute Engine: policy, template and group; then the same loop as on queued resources."""

from helpers.commands import FakeTools, launch

WHERE = ("--name", "mars", "--zone", "us-east5-a", "--slice", "v6e:2x4", "--poll", "0")
TRAIN = ("--", "--config", "tests/launch/data/run.yaml", "output_dir=gs://bucket/runs/a")
WORDS = {
    "resource-policies create": "policy",
    "instance-templates create": "template",
    "managed create": "group",
    "managed wait-until": "wait",
    "compute scp": "copy",
    "setup_host.sh": "install",
    "systemd-run": "start",
    "echo worker-state=": "look",
    "managed delete": "delete group",
    "instance-templates delete": "delete template",
    "resource-policies delete": "delete policy",
}
ALL_DELETED = ["delete group", "delete template", "delete policy"]


def gce(tools: FakeTools, command: str, *options: str):
    return launch("gce/slice.sh", command, *WHERE, *options, *TRAIN, tools=tools)


def story(tools: FakeTools) -> list[str]:
    return [WORDS[part] for part in tools.matching(*WORDS)]


def two_hosts(tools: FakeTools) -> None:
    tools.rule(r"list-instances mars .*value\(name\)", "mars-a\nmars-b\n")


def exists(tools: FakeTools, *kinds: str) -> None:
    for kind in kinds or ("resource-policies", "instance-templates", "managed"):
        tools.rule(f"{kind} list ", "mars\n")


def looks(tools: FakeTools, *answers: str) -> None:
    """What each host says, one look after the other (two hosts: two answers a look)."""
    for i, answer in enumerate(answers):
        code = 255 if answer == "lost" else 0
        times = 2 if i < len(answers) - 1 else -1
        tools.rule("echo worker-state=", "" if code else f"worker-state={answer}\n", code=code, times=times)


def test_create_makes_policy_template_and_group(tools):
    assert gce(tools, "create", "--spot").returncode == 0
    policy, template, group = (call for call in tools.calls() if " create" in call)
    assert policy == (
        "gcloud compute resource-policies create workload-policy mars --region=us-east5 --type=HIGH_THROUGHPUT "
        "--accelerator-topology=2x4"
    )
    assert "--machine-type=ct6e-standard-4t" in template
    assert "--provisioning-model=SPOT" in template
    assert group == (
        "gcloud compute instance-groups managed create mars --zone=us-east5-a --size=2 --template=mars "
        "--workload-policy=mars --default-action-on-vm-failure=do-nothing"
    )


def test_create_makes_only_what_is_missing(tools):
    exists(tools, "resource-policies", "instance-templates")
    assert gce(tools, "create").returncode == 0
    assert story(tools) == ["group"]


def test_create_does_not_take_an_error_for_an_empty_answer(tools):
    tools.rule("resource-policies list", error="no permission", code=1)
    assert gce(tools, "create").returncode != 0
    assert story(tools) == []


def test_create_stops_where_it_fails(tools):
    tools.rule("instance-templates create", error="bad machine type", code=1)
    assert gce(tools, "create").returncode == 1
    assert story(tools) == ["policy", "template"]


def test_a_reservation_is_named_in_the_template(tools):
    assert gce(tools, "create", "--reservation", "mine").returncode == 0
    template = next(call for call in tools.calls() if "instance-templates create" in call)
    assert "--provisioning-model=RESERVATION_BOUND" in template
    assert "--reservation=mine" in template


def test_commands_reach_every_host(tools):
    two_hosts(tools)
    assert gce(tools, "setup").returncode == 0
    installs = [call for call in tools.calls() if "setup_host.sh" in call]
    assert sorted(call.split()[3] for call in installs) == ["mars-a", "mars-b"]


def test_up_survives_a_preemption_and_cleans_up(tools):
    two_hosts(tools)
    tools.rule(r"list-instances mars .*value\(status\)", "RUNNING\nSTOPPING\n")
    looks(tools, "running:0", "lost", "lost", "lost", "exited:0")
    for kind in ("resource-policies", "instance-templates", "managed"):
        tools.rule(f"{kind} list ", "", times=1)  # first nothing is there
    exists(tools, "resource-policies", "instance-templates")
    tools.rule("managed list ", "mars\n", times=1)  # to be deleted
    tools.rule("managed list ", "", times=1)  # to be made again
    tools.rule("managed list ", "mars\n")
    result = gce(tools, "up", "--spot", "--max-failures", "0")
    assert result.returncode == 0, result.stderr
    told = story(tools)
    assert told[:4] == ["policy", "template", "group", "wait"]
    again = told.index("delete group")
    assert told[again : again + 3] == ["delete group", "group", "wait"]
    assert told.count("start") == 4  # two hosts, two lives
    assert told[-3:] == ALL_DELETED


def test_a_group_that_never_gets_stable_ends_the_loop(tools):
    tools.rule("wait-until", error="timeout while waiting for group to become stable", code=1)
    exists(tools)
    result = gce(tools, "up", "--max-failures", "1")
    assert result.returncode == 1
    assert story(tools).count("wait") == 2
    assert "copy" not in story(tools)
    assert story(tools)[-3:] == ALL_DELETED


def test_one_host_that_fails_to_install_stops_the_start(tools):
    two_hosts(tools)
    exists(tools)
    tools.rule("ssh mars-b .*setup_host.sh", error="No matching distribution", code=1)
    result = gce(tools, "up", "--max-failures", "0")
    assert result.returncode == 1
    assert "start" not in story(tools)


def test_delete_skips_what_is_gone(tools):
    exists(tools, "resource-policies")
    assert gce(tools, "delete").returncode == 0
    assert story(tools) == ["delete policy"]
