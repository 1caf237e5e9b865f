"""Seeded nonsense for every verb, setting and received file: `cases` makes it, `running` runs it, `world` is what it is done to."""
