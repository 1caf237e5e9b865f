"""A profile as text for a terminal. It is written from what profile.json holds, so that both say the same."""

from __future__ import annotations

from typing import Any

from ...base.holding import CATEGORIES, PHASES
from ...base.units import format_bytes, format_tokens
from ...planner.text import columns, seconds

ROWS = 6  # of a ranking


def describe(profile: dict[str, Any], *, explain: bool = False) -> list[str]:
    """profile: as `Profile.json` gives it."""
    planned, gpu = profile["planned"], profile["allocated"] is not None
    peak = profile["peak"]
    layers = f"{profile['layers']} of {profile['model']['layers']} layers"
    if profile["states"]:
        layers += ", states of all"
    lines = [
        f"{profile['model']['name']} at {format_tokens(profile['context'])} tokens, rank 0 of {profile['rank_of']}, {layers}: "
        f"measured on {profile['device']}, attention by {profile['kernel']}",
        f"  peak    {format_bytes(peak)} of tensors in {profile['peak_phase']}; planned {format_bytes(planned['peak'])} in "
        f"{planned['peak_phase']} ({peak / planned['peak'] - 1:+.1%})",
    ]
    if gpu:
        lines += _checked(profile)
    lines += _categories(profile)
    if explain:
        lines += ["  by phase, planned and measured", *_phases(profile)]
    shown = 4 * ROWS if explain else ROWS
    lines += ["  modules at the peak", *_ranking(profile["modules"], "name", peak, shown)]
    lines += ["  lines at the peak", *_ranking(profile["lines"], "where", peak, shown)]
    lines += _time(profile, gpu)
    lines += ["  kernels" if gpu else "  operators", *_kernels(profile["kernels"], shown)] if profile["kernels"] else []
    if profile["missing"]:
        lines += ["  not to be had without a GPU", *(f"    {item}" for item in profile["missing"])]
    return lines


def _checked(profile: dict[str, Any]) -> list[str]:
    counted, steps = profile["allocated"]["counted"], profile["allocated"]["steps"]
    around = profile["around"]
    return [
        f"          torch's own count {format_bytes(counted)} in the same step ({profile['peak'] / counted - 1:+.1%}), "
        f"{format_bytes(steps)} in steps that were not watched",
        f"          around it: {format_bytes(around['slack'])} held by the allocator, {format_bytes(around['context'])} by CUDA",
    ]


def _categories(profile: dict[str, Any]) -> list[str]:
    """Each at its own peak: they need not be the same moment."""
    planned = profile["planned"]["phases"][profile["planned"]["peak_phase"]]
    measured = profile["categories"]
    least = 0.005 * max(profile["peak"], profile["planned"]["peak"])
    names = [name for name in CATEGORIES if max(planned.get(name, 0), measured.get(name, 0)) >= least]
    rows = [["", "planned", "measured", "difference"]]
    for name in names:
        rows.append([name, *_pair(planned.get(name, 0), measured.get(name, 0))])
    rows.append(["all", *_pair(sum(planned.values()), sum(measured.values()))])
    return columns(rows)


def _phases(profile: dict[str, Any]) -> list[str]:
    planned, measured = profile["planned"]["phases"], profile["phases"]
    rows = [["", "planned", "measured", "difference"]]
    for phase in PHASES:
        if phase in planned and phase in measured:
            rows.append([phase, *_pair(sum(planned[phase].values()), sum(measured[phase].values()))])
    return columns(rows)


def _pair(planned: int, measured: int) -> list[str]:
    apart = measured - planned
    sign = "+" if apart >= 0 else "-"
    return [format_bytes(planned), format_bytes(measured), f"{sign}{format_bytes(abs(apart))}"]


def _ranking(rows: list[dict[str, Any]], name: str, peak: int, shown: int) -> list[str]:
    lines = [f"    {format_bytes(row['bytes']):>9}  {row['bytes'] / peak:>4.0%}  {row[name]}" for row in rows[:shown]]
    rest = sum(row["bytes"] for row in rows[shown:])
    return lines + ([f"    {format_bytes(rest):>9}  {rest / peak:>4.0%}  {len(rows) - shown} others"] if rest else [])


def _time(profile: dict[str, Any], gpu: bool) -> list[str]:
    rate = f"{profile['tokens_per_second']:,.0f} tokens/s"
    line = f"  time    {seconds(profile['seconds'])} a step (median of {len(profile['steps'])}), {rate}"
    if gpu:
        planned = profile["planned"]
        line += " per GPU; " + (
            "no time is planned without arithmetic of the model"
            if planned["step"] is None
            else f"planned {seconds(planned['step'])}, {planned['tokens_per_second']:,.0f} tokens/s"
        )
    lines = [line]
    if profile["rank_of"] > 1:
        lines.append("          one rank without its peers: communication takes no time")
    copies = profile["copies"]
    if copies is None:
        lines.append("  copies  none: everything that is kept stays on the device")
        return lines
    hidden = max(0.0, copies["seconds"] - copies["exposed"])
    lines.append(
        f"  copies  {format_bytes(copies['bytes_out'])} out and {format_bytes(copies['bytes_in'])} in ({copies['to']}), "
        f"{seconds(copies['seconds'])}: {seconds(hidden)} hidden, {seconds(copies['exposed'])} waited for"
    )
    if copies["traced"]:
        traced = copies["traced"]
        lines.append(
            f"          by the trace {seconds(traced['seconds'])} of copies, {seconds(traced['alone'])} of them with no kernel "
            "beside"
        )
    return lines


def _kernels(kernels: list[dict[str, Any]], shown: int) -> list[str]:
    whole = sum(row["seconds"] for row in kernels)
    return [
        f"    {seconds(row['seconds']):>9}  {row['seconds'] / whole:>4.0%}  {row['calls']:>6,} x  {_short(row['name'])}"
        for row in kernels[:shown]
    ]


def _short(name: str) -> str:
    return name if len(name) <= 90 else f"{name[:87]}..."
