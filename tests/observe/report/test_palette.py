"""Colours of the categories differ for every eye. Simulated as in Machado, Oliveira and Fernandes (2009), at full severity;
distances are Oklab's, times 100."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources

import pytest

from ithaca.observe.report.values import CATEGORIES

EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
LMS = ((0.412221, 0.536333, 0.051446), (0.211903, 0.680700, 0.107397), (0.088302, 0.281719, 0.629979))
LAB = ((0.210454, 0.793618, -0.004072), (1.977998, -2.428592, 0.450594), (0.025904, 0.782772, -0.808676))


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def seen(colour: str, eye: str) -> list[float]:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = [min(1.0, max(0.0, each)) for each in times(EYES[eye], light)]
    return times(LAB, [each ** (1 / 3) for each in times(LMS, light)])


@pytest.fixture(scope="module")
def colours() -> dict[str, str]:
    style = resources.files("ithaca.observe.report").joinpath("page.css").read_text()
    return {name: re.findall(rf"--{name}: (#[0-9a-f]{{6}});", style)[0] for name in CATEGORIES}


@pytest.mark.parametrize("eye", EYES)
def test_categories_can_be_told_apart(colours: dict[str, str], eye: str):
    assert len(colours) == 14
    for a, b in itertools.combinations(CATEGORIES, 2):
        assert 100 * math.dist(seen(colours[a], eye), seen(colours[b], eye)) > 7, (a, b)
    for a, b in itertools.pairwise(CATEGORIES):  # neighbours in a stack
        assert 100 * math.dist(seen(colours[a], eye), seen(colours[b], eye)) > 14, (a, b)


def test_every_category_has_a_class(colours: dict[str, str]):
    style = resources.files("ithaca.observe.report").joinpath("page.css").read_text()
    assert all(f".cat-{name} {{ --fill: var(--{name}); }}" in style for name in colours)
