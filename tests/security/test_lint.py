"""What our own code must not do, found by parsing it: unpickle, evaluate, ask a shell, load without limits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "src/ithaca").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])

# Calls that are there for a reason: file -> call -> how often. What is not used any more must go from here too.
ALLOWED = {
    # a process talks to the children it has started itself, through a pipe that nobody else has
    "src/ithaca/base/processes/worker.py": Counter({"pickle.loads": 1}),
    "src/ithaca/base/processes/rank.py": Counter({"pickle.loads": 2}),
    # the unpickler that knows a dozen names and refuses all others
    "src/ithaca/storage/safe_metadata.py": Counter({"pickle.Unpickler": 1}),
}

NEVER = {
    *(
        f"{module}.{name}"
        for module in ("pickle", "_pickle", "dill", "cloudpickle")
        for name in ("load", "loads", "Unpickler")
    ),
    *("marshal.load", "marshal.loads", "shelve.open", "joblib.load", "pandas.read_pickle", "torch.jit.load"),
    *(
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "yaml.UnsafeLoader",
        "yaml.FullLoader",
        "yaml.Loader",
    ),
    *("eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.distributed.checkpoint.format_utils.dcp_to_torch_save", "tempfile.mktemp"),
}
FLAGS = {"weights_only": False, "shell": True, "allow_pickle": True, "trust_remote_code": True}
NEEDS = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}


def found_in(text: str, *, remote_code: bool = True) -> list[str]:
    """Names of what is forbidden in a piece of Python. remote_code: loading a model must say whether its code may run."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(
                {
                    each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                    for each in node.names
                }
            )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return "?"

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found += [name for each in node.names if (name := f"{node.module}.{each.name}") in NEVER]
        elif isinstance(node, ast.Attribute) and (name := dotted(node)) in NEVER:
            found.append(name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and names.get(node.id, node.id) in NEVER:
            found.append(names.get(node.id, node.id))
        if not isinstance(node, ast.Call):
            continue
        given = {each.arg: each.value for each in node.keywords}
        constants = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        found += [f"{key}={value}" for key, value in FLAGS.items() if constants.get(key, not value) is value]
        name = dotted(node.func)
        if name in NEEDS and constants.get(NEEDS[name][0]) is not NEEDS[name][1]:
            found.append(f"{name} without {NEEDS[name][0]}={NEEDS[name][1]}")
        owner, _, method = name.rpartition(".")
        auto = owner.rpartition(".")[2].startswith("Auto") or owner.startswith("transformers")
        if remote_code and auto and method in ("from_pretrained", "from_config") and "trust_remote_code" not in given:
            found.append(f"{method} without trust_remote_code")
    return found


def test_our_code_keeps_to_it():
    seen: dict[str, Counter[str]] = {}
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        found = Counter(found_in(path.read_text(), remote_code=name.startswith("src/")))
        if found:
            seen[name] = found
    assert seen == ALLOWED
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle\npickle.load(f)", "pickle.load"),
        ("import pickle as p\nx = p.loads", "pickle.loads"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("import torch\ntorch.load(f)", "torch.load without weights_only=True"),
        ("import torch\ntorch.load(f, weights_only=False)", "weights_only=False"),
        ("from torch import load\nload(f, weights_only=limit)", "torch.load without weights_only=True"),
        ("import numpy as np\nnp.load(f)", "numpy.load without allow_pickle=False"),
        ("import yaml\nyaml.load(f, Loader=yaml.SafeLoader)", "yaml.load"),
        ("import yaml\nclass A(yaml.FullLoader): pass", "yaml.FullLoader"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import os\nos.system('ls')", "os.system"),
        ("import subprocess as s\ns.run('ls', shell=True)", "shell=True"),
        ("AutoConfig.from_pretrained(x)", "from_pretrained without trust_remote_code"),
        ("AutoConfig.from_pretrained(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("from transformers import AutoModel as M\nM.from_config(x)", "from_config without trust_remote_code"),
    ],
)
def test_the_search_finds_it(text: str, name: str):
    assert name in found_in(text)


def test_the_search_leaves_the_rest_alone():
    text = (
        "import re, torch, pickle, subprocess, numpy as np\nre.compile('x'); model.eval(); torch.compile(m); pickle.dumps(1)\n"
        "torch.load(f, weights_only=True); np.load(f, allow_pickle=False); subprocess.run(['ls'])\n"
        "AutoConfig.from_pretrained(x, trust_remote_code=options.trust)"
    )
    assert found_in(text) == []
