"""How sure a figure is: its n, its spread over prompts, its interval, and comparisons in pairs.

Every figure is a ratio of sums over prompts, sum x_i / sum y_i (tokens over rounds, answers over
prompts). Rounds of one prompt resemble each other, so prompts are resampled, never rounds:

    spread      standard deviation over prompts of x_i / y_i
    interval    2.5 and 97.5 percentile of (sum x) / (sum y) over 2,000 draws of n prompts, with
                replacement (percentile bootstrap: Efron 1979; of ratios of counts: Davison and
                Hinkley 1997, 2.4)
    in pairs    two drafters on the same prompts: a resampled prompt brings the counts of both, so
                that easy and hard prompts do not count as differences between drafters
    over seeds  two recipes, each trained from several seeds: `over_seeds`

Below `MIN_PROMPTS` prompts the interval itself is not to be relied on, and `few` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

MIN_PROMPTS = 30
BOOTSTRAP_RESAMPLES = 2000
_Z95 = 1.959964

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """One figure and how sure it is.

    value      sum x / sum y; None: nothing to divide by
    n          sum y, what the mean is over: rounds, drafted tokens, answers
    n_prompts  prompts that have any of it
    spread     standard deviation over those prompts, None below two
    ci95       interval over prompts, None below two
    few        fewer than `MIN_PROMPTS` prompts
    """

    value: float | None
    n: float
    n_prompts: int
    spread: float | None
    ci95: Interval | None
    few: bool


@dataclass(frozen=True)
class Paired:
    """One figure of two drafters on the same prompts.

    ratio and difference of the pooled figures, ours over and less theirs, with paired intervals;
    `wins` is the share of prompts on which ours is higher, equal ones counting half. `clear`: the
    interval of the ratio does not hold 1.
    """

    ours: float | None
    theirs: float | None
    ratio: float | None
    ratio_ci95: Interval | None
    difference: float | None
    difference_ci95: Interval | None
    wins: float | None
    n_prompts: int
    few: bool

    @property
    def clear(self) -> bool:
        return self.ratio_ci95 is not None and not self.ratio_ci95[0] <= 1 <= self.ratio_ci95[1]


def estimate(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Estimate:
    """sum numerators / sum denominators, one pair for each prompt, with everything about it."""
    rows = np.array(list(zip(numerators, denominators, strict=True)), dtype=np.float64)
    rows = rows.reshape(-1, 2)
    rows = rows[rows[:, 1] > 0]
    n, total = len(rows), rows.sum(axis=0)
    each = rows[:, 0] / rows[:, 1]
    return Estimate(
        value=float(total[0] / total[1]) if n else None,
        n=float(total[1]),
        n_prompts=n,
        spread=float(each.std(ddof=1)) if n > 1 else None,
        ci95=bootstrap_ci95(rows, _ratio, seed=seed),
        few=n < MIN_PROMPTS,
    )


def share(marks: Sequence[bool]) -> Estimate:
    """Share of right ones, one mark for each prompt."""
    return share_of([float(mark) for mark in marks], [1.0] * len(marks))


def share_of(parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0) -> Estimate:
    """`estimate` of a share, 0 <= part <= whole for each prompt, that never claims to be certain.

    Where the shares of all prompts are alike a bootstrap would: of 6 right ones out of 6 it says
    [1, 1]. There, and where each prompt counts once, the interval is Wilson's (1927), of 6 out of 6
    [0.61, 1]. Prompts are independent and their rounds are not: its n is that of prompts. None of
    one prompt whose share lies between.
    """
    found = estimate(parts, wholes, seed=seed)
    each = {part / whole for part, whole in zip(parts, wholes, strict=True) if whole > 0}
    alike = found.value in (0, 1) or (len(each) == 1 and found.n_prompts > 1)
    if found.value is None or not (alike or found.n == found.n_prompts):
        return found
    n, z2 = found.n_prompts, _Z95**2
    middle = (found.value + z2 / (2 * n)) / (1 + z2 / n)
    spread = found.value * (1 - found.value) / n + z2 / (4 * n * n)
    half = _Z95 * spread**0.5 / (1 + z2 / n)
    return replace(found, ci95=(max(middle - half, 0.0), min(middle + half, 1.0)))


def paired(
    ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], *, seed: int = 0
) -> Paired:
    """Compare two pooled ratios on the same prompts, each prompt a (numerator, denominator).

    Prompts on which either has nothing to divide by are left out of both. Raises ValueError if
    the two have not as many prompts.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} prompts of ours, {len(theirs)} of theirs: not the same")
    rows = np.array([(*a, *b) for a, b in zip(ours, theirs, strict=True)], dtype=np.float64)
    rows = rows.reshape(-1, 4)
    rows = rows[(rows[:, 1] > 0) & (rows[:, 3] > 0)]
    n = len(rows)
    if not n:
        return Paired(None, None, None, None, None, None, None, 0, True)
    sums = rows.sum(axis=0)
    mine, other = rows[:, 0] / rows[:, 1], rows[:, 2] / rows[:, 3]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(ratio_of_ratios(sums))
    return Paired(
        ours=float(sums[0] / sums[1]),
        theirs=float(sums[2] / sums[3]),
        ratio=ratio if np.isfinite(ratio) else None,
        ratio_ci95=bootstrap_ci95(rows, ratio_of_ratios, seed=seed),
        difference=float(_difference(sums)),
        difference_ci95=bootstrap_ci95(rows, _difference, seed=seed),
        wins=float(((mine > other) + 0.5 * (mine == other)).mean()),
        n_prompts=n,
        few=n < MIN_PROMPTS,
    )


@dataclass(frozen=True)
class OverSeeds:
    """Two recipes, each trained from several seeds and measured on the same prompts.

    ratio       ours over theirs, all seeds pooled
    ratio_ci95  over prompts and seeds; None below two prompts
    prompts_sd  standard error of log ratio from the choice of prompts
    seeds_sd    that from the choice of seeds; None where neither side has two
    freedom     of Student's t
    per_seed    pooled figures of each seed, ours and theirs
    """

    ratio: float
    ratio_ci95: Interval | None
    prompts_sd: float | None
    seeds_sd: float | None
    freedom: float | None
    per_seed: tuple[tuple[float, ...], tuple[float, ...]]


def over_seeds(ours: np.ndarray, theirs: np.ndarray, *, seed: int = 0) -> OverSeeds:
    """Compare two figures, [seeds, prompts, 2] counts each: numerator and denominator.

    A trained drafter stands for its recipe, and another seed would have given another: with r_s
    the log of a side's pooled figure of seed s,

        V   = V_prompts + var(r_s of ours) / seeds + var(r_s of theirs) / seeds
        log ratio  +-  t_f sqrt V

    V_prompts is the bootstrap's over prompts, f Welch's and Satterthwaite's degrees of freedom
    (1947) of the three parts: with three seeds f is small and t far above 1.96, where resampling
    three seeds would claim to know their spread. Part of the spread of r_s comes from sampled
    tokens, which V_prompts holds too: the interval is rather too wide. A side of one seed adds
    nothing, which is right for what is not trained and for nothing else.

    Raises ValueError if the prompts are not the same number.
    """
    if ours.shape[1:] != theirs.shape[1:]:
        raise ValueError(f"prompts and counts {ours.shape[1:]} of ours, {theirs.shape[1:]}")
    rows = np.concatenate([ours.sum(0), theirs.sum(0)], axis=1).astype(np.float64)
    ratio, n = float(ratio_of_ratios(rows.sum(0))), len(rows)
    sides = [side.sum(1)[:, 0] / side.sum(1)[:, 1] for side in (ours, theirs)]
    per_seed = (tuple(map(float, sides[0])), tuple(map(float, sides[1])))
    logs = np.log(_resampled(rows, ratio_of_ratios, seed))
    if not logs.size:
        return OverSeeds(ratio, None, None, None, None, per_seed)
    parts = [(float(logs.var()), n - 1)]
    several = [np.log(side) for side in sides if len(side) > 1]
    parts += [(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in several]
    total = sum(part for part, _ in parts)
    freedom = total**2 / sum(part**2 / f for part, f in parts) if total else float(n - 1)
    half = student_quantile(freedom) * total**0.5
    return OverSeeds(
        ratio,
        (ratio * float(np.exp(-half)), ratio * float(np.exp(half))),
        parts[0][0] ** 0.5,
        sum(part for part, _ in parts[1:]) ** 0.5 if several else None,
        freedom,
        per_seed,
    )


def student_quantile(freedom: float, within: float = 0.95) -> float:
    """t such that a Student variable of `freedom` > 0 degrees lies within [-t, t] with that chance.

    With x = sqrt(f) tan a the density is proportional to cos(a)^(f - 1) da.
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    middle = (angle[1:] + angle[:-1]) / 2
    mass = np.cumsum(np.cos(middle) ** (freedom - 1))
    at = np.interp(within, mass / mass[-1], angle[1:])
    return float(freedom**0.5 * np.tan(at))


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def ratio_of_ratios(sums: np.ndarray) -> np.ndarray:
    """(x / y) / (x' / y') of four sums [4, ...]: ours over theirs."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def _difference(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1] - sums[2] / sums[3]


def bootstrap_ci95(
    per_prompt: np.ndarray | Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int = 0,
    resamples: int = BOOTSTRAP_RESAMPLES,
) -> Interval | None:
    """95 % percentile interval of a statistic of sums, resampling prompts with replacement.

    per_prompt: n rows of c sums (tokens, seconds, ...). statistic maps the c columns [c, B] of
    resampled sums to B values. Drawing n prompts with replacement is drawing how often each one
    counts, so one multinomial matrix [B, n] times the rows [n, c] gives every resample at once.
    None below two prompts: one prompt says nothing about the next.
    """
    values = _resampled(np.asarray(per_prompt, dtype=np.float64), statistic, seed, resamples)
    if values.size == 0:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def _resampled(
    rows: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    seed: int,
    resamples: int = BOOTSTRAP_RESAMPLES,
) -> np.ndarray:
    """The statistic of every draw of n prompts that has one; none below two prompts."""
    n = len(rows)
    if n < 2:
        return np.empty(0)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic((counts @ rows).T)
    return values[np.isfinite(values)]


def ratio_ci95(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Interval | None:
    """95 % interval of sum numerators / sum denominators, one pair for each prompt."""
    return bootstrap_ci95(list(zip(numerators, denominators, strict=True)), _ratio, seed=seed)


def sample_size_warnings(n_prompts: int) -> list[str]:
    """A sentence to print when there are too few prompts for the figures to mean much."""
    if n_prompts >= MIN_PROMPTS:
        return []
    return [
        f"few prompts ({n_prompts}): below {MIN_PROMPTS} the topic of the prompts moves accepted "
        "length more than the drafter does"
    ]
