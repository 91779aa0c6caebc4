"""Queued resources: the loop from nothing to done, with a cloud that fails and preempts on cue."""

import shlex
import subprocess

from helpers.commands import FakeTools, launch

WHERE = ("--name", "mars", "--zone", "us-west4-a", "--slice", "v5e:4x4", "--poll", "0")
TRAIN = ("--", "--config", "tests/launch/data/run.yaml", "output_dir=gs://bucket/runs/a")
WORDS = {  # what to look for in a call, and its name in a story
    "queued-resources create": "create",
    "queued-resources delete": "delete",
    "tpu-vm scp": "copy",
    "setup_host.sh": "install",
    "systemd-run": "start",
    "echo worker-state=": "look",
}


def tpu_vm(tools: FakeTools, command: str, *options: str):
    return launch("tpu_vm/tpu_vm.sh", command, *WHERE, *options, *TRAIN, tools=tools)


def story(tools: FakeTools) -> list[str]:
    return [WORDS[part] for part in tools.matching(*WORDS)]


def states(tools: FakeTools, *answers: str) -> None:
    """What `queued-resources list` says, one answer a time; the last one for ever."""
    for i, answer in enumerate(answers):
        tools.rule("queued-resources list", answer, times=1 if i < len(answers) - 1 else -1)


def workers(tools: FakeTools, *answers: str) -> None:
    """What the two hosts' systemd says, one look a time; the last one for ever. `lost`: SSH fails."""
    for i, answer in enumerate(answers):
        output = "".join(f"worker-state={state}\n" for state in answer.split())
        lost = answer == "lost"
        tools.rule(
            "echo worker-state=",
            "" if lost else output,
            error="ssh: connect to host: Operation timed out\n" if lost else "",
            code=255 if lost else 0,
            times=1 if i < len(answers) - 1 else -1,
        )


def test_create_asks_for_the_slice_it_was_told(tools):
    states(tools, "")
    assert tpu_vm(tools, "create", "--spot", "--project", "p", "--service-account", "me@p").returncode == 0
    assert tools.calls()[-1] == (
        "gcloud compute tpus queued-resources create mars --zone=us-west4-a --project=p --node-id=mars "
        "--type=v5litepod --topology=4x4 --runtime-version=v2-alpha-tpuv5-lite --spot --service-account=me@p"
    )


def test_create_leaves_a_slice_that_is_there(tools):
    states(tools, "WAITING_FOR_RESOURCES")
    result = tpu_vm(tools, "create")
    assert result.returncode == 0
    assert story(tools) == []
    assert "is there: WAITING_FOR_RESOURCES" in result.stderr


def test_create_replaces_a_preempted_slice(tools):
    states(tools, "SUSPENDED")
    assert tpu_vm(tools, "create").returncode == 0
    assert story(tools) == ["delete", "create"]


def test_create_does_not_take_an_error_for_an_empty_answer(tools):
    tools.rule("queued-resources list", error="no permission", code=1)
    assert tpu_vm(tools, "create").returncode == 1
    assert story(tools) == []


def test_wait_goes_on_until_active(tools):
    states(tools, "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    assert tpu_vm(tools, "wait").returncode == 0
    assert len(tools.calls()) == 3


def test_wait_gives_up_on_a_request_that_failed(tools):
    states(tools, "WAITING_FOR_RESOURCES", "FAILED")
    assert tpu_vm(tools, "wait").returncode == 1


def test_run_starts_all_workers_with_the_trainer_command_and_follows_them(tools):
    workers(tools, "running:0 running:0", "exited:0 running:0", "exited:0 exited:0")
    assert tpu_vm(tools, "run").returncode == 0
    assert story(tools) == ["start", "look", "look", "look"]
    start = tools.calls()[0]
    assert "--worker=all" in start
    assert (
        "launch/worker.sh --config tests/launch/data/run.yaml output_dir=gs://bucket/runs/a mesh.distributed=true"
        in start
    )


def test_what_the_hosts_are_told_is_a_command_that_a_shell_reads(tools):
    states(tools, "ACTIVE")
    workers(tools, "exited:0 exited:0")
    odd = ("data.path=gs://bucket/it's here", "a=$HOME")
    assert launch("tpu_vm/tpu_vm.sh", "up", *WHERE, *TRAIN, *odd, tools=tools).returncode == 0
    told = [shlex.split(call)[-1].removeprefix("--command=") for call in tools.calls() if "tpu-vm ssh" in call]
    assert len(told) >= 3
    for command in told:
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
    start = next(command for command in told if "systemd-run" in command)
    words = shlex.split(start.rpartition("worker.sh ")[2])
    assert words == [
        "--config",
        "tests/launch/data/run.yaml",
        "output_dir=gs://bucket/runs/a",
        *odd,
        "mesh.distributed=true",
    ]


def test_up_from_nothing_to_done_and_cleaned_up(tools):
    states(tools, "", "PROVISIONING", "ACTIVE")
    workers(tools, "running:0 running:0", "exited:0 exited:0")
    result = tpu_vm(tools, "up")
    assert result.returncode == 0, result.stderr
    assert story(tools) == ["create", "copy", "install", "start", "look", "look", "delete"]


def test_up_survives_two_preemptions_of_both_kinds(tools):
    # The first takes the machines away, the second only stops the workers.
    states(tools, "", "ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE")
    workers(
        tools,
        "running:0 running:0",
        "lost",
        "lost",
        "lost",
        "failed:75 running:0",
        "dead:0 dead:0",
        "exited:0 exited:0",
    )
    result = tpu_vm(tools, "up", "--max-failures", "0")
    assert result.returncode == 0, result.stderr
    first = ["create", "copy", "install", "start", "look", "look", "look", "look"]
    second = ["delete", "create", "copy", "install", "start", "look", "look"]
    third = ["copy", "install", "start", "look", "delete"]
    assert story(tools) == [*first, *second, *third]
    assert result.stderr.count("preempted; starting again") == 2


def test_one_lost_connection_is_no_preemption(tools):
    states(tools, "ACTIVE")
    workers(tools, "running:0 running:0", "lost", "lost", "running:0 running:0", "exited:0 exited:0")
    result = tpu_vm(tools, "up")
    assert result.returncode == 0, result.stderr
    assert story(tools).count("start") == 1


def test_a_crashed_worker_stops_the_others_and_is_tried_again(tools):
    states(tools, "ACTIVE")
    workers(tools, "running:0 running:0", "failed:1 running:0", "failed:1 failed:75", "exited:0 exited:0")
    result = tpu_vm(tools, "up", "--max-failures", "1")
    assert result.returncode == 0, result.stderr
    assert "failed, 1 of 1" in result.stderr
    assert sum("sudo systemctl stop mars-train'" in call for call in tools.calls()) == 1


def test_up_gives_up_after_too_many_crashes_and_still_cleans_up(tools):
    states(tools, "ACTIVE")
    workers(tools, "failed:1 failed:1")
    result = tpu_vm(tools, "up", "--max-failures", "2")
    assert result.returncode == 1
    assert story(tools).count("start") == 3
    assert story(tools)[-1] == "delete"
    assert any("journalctl" in call for call in tools.calls())


def test_wrong_input_is_not_tried_again(tools):
    states(tools, "ACTIVE")
    workers(tools, "failed:2 failed:2")
    result = tpu_vm(tools, "up")
    assert result.returncode == 2
    assert story(tools).count("start") == 1
    assert story(tools)[-1] == "delete"


def test_keep_leaves_the_slice(tools):
    states(tools, "ACTIVE")
    workers(tools, "exited:0 exited:0")
    assert tpu_vm(tools, "up", "--keep").returncode == 0
    assert "delete" not in story(tools)


def test_a_quota_that_is_exhausted_ends_the_loop(tools):
    states(tools, "")
    tools.rule("queued-resources create", error="Quota limit 'TPUV5sLitepodPerProjectPerZone' exceeded", code=1)
    result = tpu_vm(tools, "up", "--max-failures", "1")
    assert result.returncode == 1
    assert "exceeded" in result.stderr
    assert story(tools).count("create") == 2


def test_a_failed_installation_is_not_followed_by_a_start(tools):
    states(tools, "ACTIVE")
    tools.rule("setup_host.sh", error="No matching distribution", code=1)
    result = tpu_vm(tools, "up", "--max-failures", "0")
    assert result.returncode == 1
    assert "start" not in story(tools)


def test_delete_of_what_is_gone_does_nothing(tools):
    states(tools, "")
    assert tpu_vm(tools, "delete").returncode == 0
    assert story(tools) == []
