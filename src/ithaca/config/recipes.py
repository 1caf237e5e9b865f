"""The recipes that come with the package: one YAML file each, `MODEL_CONTEXT_HARDWARE.yaml`.

Their texts are read from the installed package, so a wheel has them too. Comments are part of a recipe: they say which hardware
it is for and which of its figures were measured.
"""

from __future__ import annotations

from importlib.resources import files

_FOLDER = files("ithaca").joinpath("recipes")


def recipe_names() -> list[str]:
    return sorted(each.name.removesuffix(".yaml") for each in _FOLDER.iterdir() if each.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The file as it is, comments included. ValueError if there is none of this name."""
    known = recipe_names()
    if name not in known:
        from .suggest import close_choice

        hint = close_choice(name, tuple(known)) or f"; there are {', '.join(known)}"
        raise ValueError(f"recipe {name!r} is unknown{hint}")
    return _FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
