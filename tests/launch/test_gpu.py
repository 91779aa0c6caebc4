"""GPUs: what is submitted to Slurm and the way back into its queue; one machine."""

import json
import subprocess

from helpers.commands import ROOT, FakeTools, environment, launch
from helpers.stub_trainer import make_stub_trainer

ARGUMENTS = ("--nodes", "2", "--gpus-per-node", "8", "--time", "24:00:00")
TRAIN = ("--", "--config", "tests/launch/data/run.yaml", "output_dir=/shared/a b")


def test_one_task_a_gpu_and_a_signal_before_the_limit(tools, tmp_path):
    tools.rule("^sbatch", "4711\n")
    result = launch("gpu/slurm.sh", *ARGUMENTS, "--partition", "h100", "--log-dir", str(tmp_path), *TRAIN, tools=tools)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "4711\n"
    call = tools.calls()[-1]
    for option in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--ntasks-per-node=8",
        "--signal=TERM@300",
        "--requeue",
        "--partition=h100",
        f"--output={tmp_path}/%x-%j.out",
    ):
        assert option in call
    train = "--config tests/launch/data/run.yaml 'output_dir=/shared/a b' mesh.distributed=true"
    assert call.endswith(f" {ROOT}/launch/gpu/job.sbatch {train}")


def test_a_job_of_that_name_is_not_submitted_twice(tools):
    tools.rule("^squeue --me --name=mars", "42\n")
    result = launch("gpu/slurm.sh", *ARGUMENTS, *TRAIN, tools=tools)
    assert (result.returncode, result.stdout) == (0, "42\n")
    assert not any(call.startswith("sbatch") for call in tools.calls())


def test_a_refused_submission_fails(tools):
    tools.rule("^sbatch", error="Invalid partition", code=1)
    assert launch("gpu/slurm.sh", *ARGUMENTS, *TRAIN, tools=tools).returncode == 1


def batch(tools: FakeTools, code: int) -> tuple[int, list[str]]:
    """The batch script inside an allocation, with tasks that end with `code`."""
    tools.rule("^srun", code=code)
    result = subprocess.run(
        [ROOT / "launch/gpu/job.sbatch", "--config", "c.yaml"],
        env=environment(tools, SLURM_JOB_ID="4711", MARS_ROOT=str(ROOT)),
    )
    return result.returncode, tools.calls()


def test_the_batch_script_runs_the_worker_in_every_task(tools):
    code, calls = batch(tools, 0)
    assert code == 0
    assert calls == [f"srun --kill-on-bad-exit=0 --wait=300 {ROOT}/launch/worker.sh --config c.yaml"]


def test_a_preempted_job_goes_back_into_the_queue(tools):
    code, calls = batch(tools, 75)
    assert code == 75
    assert calls[-1] == "scontrol requeue 4711"


def test_a_failed_job_does_not(tools):
    code, calls = batch(tools, 1)
    assert code == 1
    assert len(calls) == 1


def test_one_machine_runs_one_process_on_the_chosen_gpus(tools, tmp_path):
    stub = make_stub_trainer(tmp_path / "stub", steps=0)
    train = ("--config", "tests/launch/data/run.yaml", "a=b c")
    assert launch("gpu/node.sh", "--gpus", "0,2", "--", *train, tools=tools, PYTHON=stub).returncode == 0
    told = json.loads((tmp_path / "stub/life-0-0").read_text())
    assert told["argv"] == ["-m", "mars_jax.train", *train]
    assert told["environment"]["JAX_PLATFORMS"] == "cuda"
    assert told["environment"]["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "MARS_NUM_PROCESSES" not in told["environment"]
