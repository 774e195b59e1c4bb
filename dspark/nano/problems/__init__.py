"""Word-problem families by topic. Each module writes a few; `FAMILIES` is all of them."""

from __future__ import annotations

from dspark.nano.draw import Family
from dspark.nano.problems import (
    ages,
    averages,
    comparing,
    fractions,
    geometry,
    measuring,
    money,
    multistep,
    percent,
    rates,
    sequences,
    sharing,
    shopping,
    stories,
    travel,
)

FAMILIES: tuple[Family, ...] = (
    shopping.FAMILIES
    + money.FAMILIES
    + sharing.FAMILIES
    + travel.FAMILIES
    + measuring.FAMILIES
    + ages.FAMILIES
    + sequences.FAMILIES
    + geometry.FAMILIES
    + fractions.FAMILIES
    + percent.FAMILIES
    + comparing.FAMILIES
    + averages.FAMILIES
    + rates.FAMILIES
    + multistep.FAMILIES
    + stories.FAMILIES
)
