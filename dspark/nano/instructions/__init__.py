"""Plain instructions beside the word problems, so that the entropy of the text varies."""

from __future__ import annotations

from dspark.nano.draw import Family
from dspark.nano.instructions import ordering, rewriting, writing

FAMILIES: tuple[Family, ...] = ordering.FAMILIES + rewriting.FAMILIES + writing.FAMILIES
