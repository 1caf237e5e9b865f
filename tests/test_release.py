"""What a release carries beside the package: one version everywhere, files for clusters and containers, forms for reports.

The wheel itself is built, installed and tried by `make dist` (scripts/dist.py), which takes too long for here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import ithaca
from ithaca.cli.main import build_parser, main
from ithaca.config import load

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "examples/cluster"
RECIPE = "qwen3_32b_4m_16xh100"  # what the files of examples/cluster run
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


# One version.


def test_the_version_has_one_place():
    project = (ROOT / "pyproject.toml").read_text().partition("\n[project]\n")[2].partition("\n[")[0]
    assert '\ndynamic = ["version"]\n' in project and re.search(r"^version", project, re.M) is None
    places = [path for path in (ROOT / "src").rglob("*.py") if f'"{ithaca.__version__}"' in path.read_text()]
    assert places == [ROOT / "src/ithaca/__init__.py"]


def test_what_names_a_version_names_this_one():
    version = ithaca.__version__
    citation = read(ROOT / "CITATION.cff")
    heading = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    assert (citation["version"], str(citation["date-released"])) == heading.groups() == (version, heading[2])
    for path in (ROOT / "docker/Dockerfile", CLUSTER / "kubernetes.yaml"):
        images = re.findall(r"ithaca:([\w.]+)", path.read_text())
        assert images and set(images) == {version}, path


def test_the_command_names_what_a_report_needs(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith(f"ithaca {ithaca.__version__} (python ") and said.count("\n") == 1
    assert f"torch {torch.__version__}, transformers {metadata.version('transformers')}" in said


def test_the_citation_has_what_its_format_asks_for():
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The ithaca authors"}] and citation["license"] == "Apache-2.0"


def test_the_changelog_is_short_enough_to_read():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert sections and all(len(section.splitlines()) <= 60 for section in sections)


# Files for somebody else's cluster. Slurm's is run in tests/training/launch/test_slurm.py.


def torchrun(script: str, folder: Path, variables: dict[str, str]) -> argparse.Namespace:
    """What a script asks torchrun for, as torchrun's own parser reads it. A stand-in says which words it got."""
    program = folder / "torchrun"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    (folder / "ithaca/bin").mkdir(parents=True, exist_ok=True)
    (folder / "ithaca/bin/activate").touch()
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    done = subprocess.run(["bash", "-eu", "-c", script], env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return get_args_parser().parse_args(json.loads(done.stdout))


def check_command(asked: argparse.Namespace, node: int, address: str, port: int) -> None:
    """As docs/guides/multi_node.md has it, on as many nodes and GPUs as the recipe wants."""
    launch = load(None, recipe=RECIPE).config.launch
    assert (asked.nnodes, asked.nproc_per_node) == (str(launch.nodes), str(launch.workers)) == ("2", "8")
    assert (asked.node_rank, asked.master_addr, asked.master_port) == (node, address, port)
    assert (asked.module, asked.training_script, asked.training_script_args) == (True, "ithaca", ["train", "run.yaml"])
    assert asked.max_restarts == 0


@pytest.mark.parametrize("node", [0, 1])
def test_kubernetes(tmp_path: Path, node: int):
    job = read(CLUSTER / "kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert {each["restartPolicy"] for each in replicas.values()} == {"OnFailure"}
    pod = replicas["Worker" if node else "Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # or the operator sets none of the variables below
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted == {"shared": "/shared", "shm": "/dev/shm"} and mounted.keys() == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert container["workingDir"].startswith("/shared/")
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    # what the operator sets: RANK counts pods
    given = {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "ithaca-master-0", "MASTER_PORT": "23456"}
    check_command(torchrun(script, tmp_path, given), node, "ithaca-master-0", 23456)


@pytest.mark.parametrize("node", [0, 1])
def test_skypilot(tmp_path: Path, node: int):
    task = read(CLUSTER / "skypilot.yaml")
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    (shared,) = task["volumes"]
    assert all(place.startswith(shared + "/") for place in task["envs"].values())
    assert subprocess.run(["bash", "-n"], input=task["setup"], text=True).returncode == 0
    check_extras(task["setup"])
    given = {
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RUN_FOLDER": str(tmp_path),
    }  # fmt: skip
    check_command(torchrun(task["run"], tmp_path, given), node, "10.0.0.1", 29500)


def check_extras(text: str) -> None:
    """Those of ithaca that are installed there exist."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = set(re.findall(r"^(\w+) = \[", extras, re.M))
    asked = {name for found in re.findall(r"(?:whl\)|'\.)\[([\w,]+)\]", text) for name in found.split(",")}
    assert asked and asked <= known


def test_the_container():
    """Not built here. What can be seen: no root, nothing but the checked wheel goes in, every extra exists."""
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    steps = [line for line in lines if line and not line.startswith(("#", " "))]
    users = [line for line in steps if line.startswith("USER ")]
    assert users == ["USER ithaca"] and steps.index("USER ithaca") > max(
        index for index, line in enumerate(steps) if line.startswith(("RUN", "COPY"))
    )
    assert [line for line in steps if line.startswith(("COPY", "ADD"))] == ["COPY dist/ithaca-*.whl /tmp/wheel/"]
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored == ["*", "!dist/*.whl"]
    check_extras("\n".join(lines))
    assert any("NOT BUILT" in line for line in lines)


# Forms for reports.


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_a_form_asks_for_what_exists(path: Path):
    form = read(path)
    assert form["name"] and form["description"] and len(form["body"]) >= 3
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in asked]
    assert len(set(names)) == len(names) and all(field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)
    verbs = set(re.findall(r"`ithaca (\w+)", path.read_text()))
    (known,) = (action.choices for action in build_parser()._actions if action.dest == "verb")
    assert verbs and known is not None and verbs <= set(known)


def test_each_form_asks_for_its_evidence():
    required = {
        path.stem: {field["id"] for field in read(path).get("body", ()) if field.get("validations")} for path in FORMS
    }
    assert required == {
        "bug": {"happened", "doctor"}, "config": set(), "feature": {"want"},
        "wrong_result": {"verify", "seen", "doctor", "model"},
    }  # fmt: skip
    assert read(ROOT / ".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": False}
