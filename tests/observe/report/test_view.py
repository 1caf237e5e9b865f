"""What goes into the page: the right numbers, gaps where something is missing, and nothing that could run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ithaca.observe.report import render, write_report

from . import samples

GB = samples.GB


def data_of(page: str) -> dict[str, Any]:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(block)


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def figures(data: dict[str, Any]) -> dict[str, Any]:
    return {each["label"]: each["value"] for each in data["figures"]}


def test_a_whole_run(run: Path):
    data, lines = data_of(render(run=run)), lines_of(run)
    found = figures(data)
    assert found["Peak GPU memory"] == max(line["gpu_peak"] for line in lines)
    assert found["Tokens/s per GPU"] == median(line["tokens_per_second"] for line in lines[1:])
    assert found["MFU"] == median(line["mfu"] for line in lines[1:])
    assert found["Final loss"] == lines[-1]["loss"] and found["Tokens trained"] == 400 * samples.CONTEXT
    assert data["figures"][1]["of"] == samples.GPU
    assert data["heading"]["title"] == "llama3_8b_1m" and data["heading"]["state"]["name"] == "finished"
    assert [each["name"] for each in data["curves"]] == ["loss", "lr", "grad_norm", "rate", "memory", "copy_wait"]
    assert [line["name"] for line in data["curves"][4]["lines"]] == ["gpu_peak", "host_peak"]  # the disk holds nothing
    assert [bar["label"] for bar in data["phases"]["bars"]] == ["load", "forward", "loss", "backward", "step"]
    assert len(data["ladder"]["rungs"]) == 8 and [each["name"] for each in data["ladder"]["sweeps"]] == [
        "heads_per_stage",
        "tile",
    ]
    assert [each["key"] for each in data["tables"]] == ["kernels", "lines", "modules"]
    assert data["tables"][0]["more"] == 65 - 40


def test_plan_against_measurement(run: Path):
    lines = lines_of(run)
    rows = {row["label"]: row for row in data_of(render(run=run))["comparison"]}
    assert list(rows) == [
        "Peak GPU memory",
        "Host memory",
        "Step time",
        "Tokens/s per GPU",
    ]  # a disk of nothing is no row
    peak, planned = max(line["gpu_peak"] for line in lines), samples.plan()["allocated"]
    assert (
        rows["Peak GPU memory"]["predicted"] == planned < samples.plan()["peak"]
        and rows["Peak GPU memory"]["measured"] == peak
    )
    assert rows["Peak GPU memory"]["deviation"] == pytest.approx(peak / planned - 1)
    assert rows["Host memory"]["deviation"] == pytest.approx(68.7 / 69 - 1)
    assert rows["Step time"]["measured"] == median(line["seconds"] for line in lines[1:])


def test_the_measured_peak_comes_from_the_profile_where_no_run_was():
    data = data_of(render(plan=samples.plan(), profile=samples.profile()))
    profile = samples.profile()
    assert [row["label"] for row in data["comparison"]] == ["Tensors at the peak", "Step time", "Tokens/s per GPU"]
    assert data["comparison"][0]["measured"] == profile["peak"] and data["comparison"][0]["predicted"] == 46 * GB
    assert [bar["label"] for bar in data["at_peak"]["bars"]] == ["planned (backward)", "measured"]
    assert [bar["measured"] for bar in data["phases"]["bars"]] == [25 * GB, profile["peak"]]
    assert [bar["total"] for bar in data["phases"]["measured"]] == [25 * GB, profile["peak"]]
    assert data["profile"]["missing"] == profile["missing"] and data["profile"]["alone"] == 0.31
    facts = {each["label"]: each["value"] for each in data["heading"]["facts"]}
    assert facts["layers"] == "2 of 32" and facts["measured on"] == "NVIDIA H100" and facts["as rank 0 of"] == 8
    older = {name: each for name, each in profile.items() if name != "planned"}
    rows = data_of(render(plan=samples.plan(), profile=older))["comparison"]
    assert rows[0]["label"] == "Peak GPU memory" and rows[0]["predicted"] == samples.plan()["allocated"]


def test_given_objects_win_over_the_folder(run: Path):
    plan = {**samples.plan(), "allocated": 10 * GB}
    assert data_of(render(run=run, plan=plan))["comparison"][0]["predicted"] == 10 * GB


def test_a_resumed_step_counts_once(tmp_path: Path):
    run = samples.write_run(tmp_path / "run", steps=8, parts=False)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "loss": 99.0}) + "\n" + '{"step": 9, "loss": 1.2')  # cut off
    loss = data_of(render(run=run))["curves"][0]["lines"][0]
    assert loss["x"] == list(range(1, 9)) and loss["y"][2] == 99.0 and max(loss["y"]) == 99.0


def test_of_a_run_in_phases_the_last_one_is_compared(tmp_path: Path):
    run = samples.write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    middle = steps[len(steps) // 2]["step"]
    for line in steps:  # a short first phase: everything is ten times smaller and faster
        if line["step"] <= middle:
            line["seconds"] /= 10
            line["gpu_peak"] //= 10
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        f"{config}phases:\n- {{context: 1024, steps: {middle}}}\n- {{context: 2048, steps: 1000000}}\n"
    )
    data = data_of(render(run=run))
    second = [line for line in steps if line["step"] > middle]
    found = {row["label"]: row["measured"] for row in data["comparison"]}
    assert found["Step time"] == median(line["seconds"] for line in second[1:])
    assert found["Peak GPU memory"] == max(line["gpu_peak"] for line in second)
    assert "of the last phase" in data["figures"][0]["note"]


def test_long_runs_are_short_in_the_page(tmp_path: Path):
    run, noise = tmp_path / "run", random.Random(3)
    run.mkdir()
    losses = [2 + noise.random() for _ in range(30_000)]
    losses[12_345] = 55.5
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n + 1}, "loss": {loss}}}\n' for n, loss in enumerate(losses))
    )
    line = data_of(render(run=run))["curves"][0]["lines"][0]
    assert len(line["x"]) == len(line["y"]) <= 2000 and line["points"] == 30_000
    assert max(line["y"]) == 55.5 and line["x"][line["y"].index(55.5)] == 12_346 and min(line["y"]) == min(losses)
    assert line["mean"]["of"] == 751


def test_the_timeline_is_short_and_whole(run: Path):
    found, profile = data_of(render(run=run))["timeline"], samples.profile()
    assert found["samples"] == 3000 and len(found["seconds"]) <= 2000 and found["seconds"] == sorted(found["seconds"])
    assert all(len(layer["values"]) == len(found["seconds"]) for layer in found["layers"])
    totals = [sum(column) for column in zip(*(layer["values"] for layer in found["layers"]), strict=True)]
    assert max(totals) == profile["peak"]
    names = [layer["name"] for layer in found["layers"]]
    assert names == [name for name in samples.CATEGORIES if name in names]


def test_names_nobody_could_tell_apart_become_other():
    profile = samples.profile(3000)
    profile["timeline"]["categories"] |= {f"part {n}": [n] * 3000 for n in range(1, 200)}
    layers = {each["name"]: each["values"] for each in data_of(render(profile=profile))["timeline"]["layers"]}
    assert list(layers) == list(samples.CATEGORIES) and set(layers["other"]) == {199 * 200 // 2}
    assert len(layers["other"]) <= 2000


# Missing, null and wrong.


@pytest.mark.parametrize("kind", ["plan", "ladder", "profile"])
def test_every_field_may_be_missing_or_null_or_nonsense(kind: str):
    """Each field of each level in turn. The page is made every time, and says nothing of what is not there."""
    whole = samples.profile(20) if kind == "profile" else getattr(samples, kind)()
    tried = 0

    def walk(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        keys = (
            list(value)
            if isinstance(value, dict)
            else list(range(min(len(value), 2)))
            if isinstance(value, list)
            else []
        )
        return [found for key in keys for found in [(*path, key), *walk(value[key], (*path, key))]]

    text = json.dumps(whole)
    for path in walk(whole, ()):
        if path == (kind,):
            continue
        for instead in ("missing", None, "text", -1, float("nan"), 10**400, [], {}, [None, 3], True):
            broken = json.loads(text)
            holder = broken
            for key in path[:-1]:
                holder = holder[key]
            if instead == "missing":
                del holder[path[-1]]
            else:
                holder[path[-1]] = instead
            data_of(render(**{kind: broken}))
            tried += 1
        if tried > 400:  # deeper ones are alike
            break
    assert tried > 300


@pytest.mark.parametrize("kind", ["plan", "ladder", "profile"])
def test_nothing_but_the_first_key(kind: str):
    data = data_of(render(**{kind: {kind: 1}}))
    assert data["heading"]["title"] == kind.capitalize() and data["figures"] == []
    parts = ("comparison", "phases", "at_peak", "times", "ladder", "timeline", "profile", "tables", "curves", "stack")
    assert not any(data[part] for part in parts)


def test_a_run_that_has_only_begun(tmp_path: Path):
    (tmp_path / "status.json").write_text('{"contract": 1, "state": "failed", "cause": "no room", "exit_code": 5}')
    data = data_of(render(run=tmp_path))
    assert data["heading"]["title"] == tmp_path.name and data["curves"] == [] and data["figures"] == []
    assert data["heading"]["state"]["cause"] == "no room" and data["heading"]["state"]["exit_code"] == 5


@pytest.mark.parametrize("state", ["running", "saving"])
def test_a_killed_run_is_called_killed(tmp_path: Path, state: str):
    run = samples.write_run(tmp_path / "run", steps=8, parts=False, state=state)
    assert data_of(render(run=run))["heading"]["state"]["name"] == "killed"
    from ithaca.base.run_folder import RunFolder

    with RunFolder(run).claim():
        assert data_of(render(run=run))["heading"]["state"]["name"] == state


def test_a_run_on_the_cpu_has_no_gpus(tmp_path: Path):
    run = samples.write_run(tmp_path / "run", steps=8, parts=False)
    config = (run / "config.yaml").read_text().replace("workers: 8", "cpu: 4")
    (run / "config.yaml").write_text(config)
    data = data_of(render(run=run))
    assert "Tokens/s per process" in figures(data) and data["curves"][3]["title"] == "Tokens/s per process"


def test_unknown_categories_are_shown_behind_the_known_ones():
    plan = samples.plan()
    plan["phases"] = {"warm": {"mystery": 5, "kept": 3, "nothing": 0}, "load": {"kept": 1}}
    bars = data_of(render(plan=plan))["phases"]["bars"]
    assert [bar["label"] for bar in bars] == ["load", "warm"] and list(bars[1]["parts"]) == ["kept", "mystery"]


def test_the_stack_says_why_and_what_differs(run: Path, tmp_path: Path):
    rows = {row["field"]: row for row in data_of(render(run=run))["stack"]}
    assert rows["recompute"] == {**rows["recompute"], "value": "keep_attention", "planned": None}  # 32 times the same
    assert rows["tile"]["why"].startswith("Larger tiles") and rows["train.offload_optimizer"]["value"] == "no"
    plan = samples.plan()
    plan["stack"] = {**plan["stack"], "tile": 1024, "recompute": ["layer", "layer", "none"]}
    rows = {row["field"]: row for row in data_of(render(run=run, plan=plan))["stack"]}
    assert rows["tile"]["value"] == "4096" and rows["tile"]["planned"] == "1024"
    assert rows["recompute"]["planned"] == "2 × layer, none"


def test_the_stack_says_which_attention_ran(tmp_path: Path):
    def attention(page: str) -> str:
        return {row["field"]: row["value"] for row in data_of(page)["stack"]}["attention"]

    run = samples.write_run(tmp_path / "run", steps=8)
    assert attention(render(run=run)) == "auto", "a run of an older ithaca does not say"
    with open(run / "metrics.jsonl", "a") as file:
        for kernel in ("cudnn", "fa4"):  # the last start counts
            file.write(
                json.dumps({"event": "resume", "time": "2026-11-15T13:00:00Z", "from_step": 8, "attention": kernel})
                + "\n"
            )
        file.write(json.dumps({"event": "stop", "time": "2026-11-15T13:00:00Z"}) + "\n")
    assert attention(render(run=run)) == "fa4 (auto)"
    assert attention(render(plan=samples.plan(), profile={**samples.profile(), "kernel": "flash"})) == "flash (auto)"


# Harmless.

EVIL = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> \u2028 \ud800 {{data}} {{script}}"


def test_data_cannot_leave_its_block(tmp_path: Path):
    plan = samples.plan()
    plan["model"] = {**plan["model"], "name": EVIL}
    plan["phases"] = {EVIL: {EVIL: GB}}
    page = render(plan=plan)
    assert page.count("</script>") == 2 and "<img" not in page and "alert(1)</" not in page
    assert data_of(page)["heading"]["title"] == EVIL
    assert write_report(tmp_path / "page.html", plan=plan).read_text(encoding="utf-8") == page


def test_the_policy_names_style_and_script(page: Path):
    text = page.read_text()
    policy = html.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)[0])
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    (style,), (script,) = (
        re.findall(r"<style>(.*?)</style>", text, re.S),
        re.findall(r"<script>(.*?)</script>", text, re.S),
    )
    for content in (style, script):
        assert base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() in policy


def test_the_page_names_no_other_place(page: Path):
    shell = re.sub(r'<script type="application/json".*?</script>', "", page.read_text(), flags=re.S)
    namespaces = ("http://www.w3.org/2000/svg",)
    assert [
        url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", shell) if not url.startswith(namespaces)
    ] == []
    assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", shell)
    assert not re.search(r"""\s(?:style|on\w+)=["']""", shell), "the policy would refuse it"


def test_the_same_input_gives_the_same_page(run: Path):
    assert render(run=run) == render(run=run)
