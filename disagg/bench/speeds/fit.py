"""From samples of an engine's times to the speeds that `disagg plan` takes: least squares.

Pure functions. Errors are relative to what was measured, so that short prompts count as much as
long ones; no speed is negative. Residuals, of every sample, are part of the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from disagg.errors import DisaggError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PromptSample:
    """A prompt that an engine computed. `engine_s`: from its first step to its first token, as
    the engine counts; `client_s`: from the request to the answer."""

    tokens: int
    engine_s: float
    client_s: float


@dataclass(frozen=True)
class StepSample:
    """Steps of a decode engine, their mean. `context`: tokens of all sequences together."""

    sequences: int
    context: float
    seconds: float


@dataclass(frozen=True)
class MoveSample:
    """A prompt that was handed off. `first_s`: the decode leg, to its first token."""

    tokens: int
    first_s: float


@dataclass(frozen=True)
class Fit:
    """Coefficients by name, none negative, and how far off each sample is, as a share of it."""

    speeds: Mapping[str, float]
    residuals: Sequence[float]

    @property
    def worst(self) -> float:
        """The largest residual's size."""
        return max(abs(residual) for residual in self.residuals)

    @property
    def typical(self) -> float:
        """The median of their sizes."""
        return statistics.median(abs(residual) for residual in self.residuals)


def least_squares(
    columns: Mapping[str, Sequence[float]],
    measured: Sequence[float],
    known: Sequence[float] | None = None,
) -> Fit:
    """Coefficients of these columns, of least relative error, none negative.

    Of several samples of one setting the median counts: others that use the machine make single
    ones slow. `known`: the part of each measured time that is accounted for already. A column whose
    coefficient would be negative is left out, the worst first. Raises DisaggError if none is left.
    """
    every = np.array(list(columns.values())).T
    settings, of = np.unique(every, axis=0, return_inverse=True)
    less = np.array(known or [0.0] * len(measured))
    seconds = _medians(np.array(measured), of)
    wanted = 1 - _medians(less, of) / seconds
    names = list(columns)
    while names:
        matrix = settings[:, [list(columns).index(name) for name in names]] / seconds[:, None]
        scale = np.abs(matrix).max(axis=0)
        found: Floats = np.linalg.lstsq(matrix / scale, wanted, rcond=None)[0]
        if found.min() >= 0:
            speeds = dict.fromkeys(columns, 0.0)
            speeds |= dict(zip(names, (found / scale).tolist(), strict=True))
            expected = every @ np.array(list(speeds.values())) + less
            return Fit(speeds, (expected / np.array(measured) - 1).tolist())
        names.pop(int(found.argmin()))
    raise DisaggError("the times measured grow with nothing; measure on a quieter machine")


def _medians(values: Floats, of: npt.NDArray[np.intp]) -> Floats:
    """The median of each group; `of` says which each value belongs to."""
    return np.array([np.median(values[of == group]) for group in range(of.max() + 1)])


def prompts(samples: Sequence[PromptSample], step_tokens: int, step_s: float | None = None) -> Fit:
    """`token_s` and `token_context_s` of an engine whose steps take so many tokens, and `step_s`
    unless it is given."""
    steps = [float(-(-s.tokens // step_tokens)) for s in samples]
    columns = {
        "token_s": [float(s.tokens) for s in samples],
        "token_context_s": [s.tokens * s.tokens / 2 for s in samples],
    }
    measured = [s.engine_s for s in samples]
    if step_s is None:
        return least_squares({"step_s": steps, **columns}, measured)
    return least_squares(columns, measured, [step_s * count for count in steps])


def steps(samples: Sequence[StepSample]) -> Fit:
    """`step_s`, `sequence_s` and `context_token_s` of a decode engine."""
    columns = {
        "step_s": [1.0] * len(samples),
        "sequence_s": [float(s.sequences) for s in samples],
        "context_token_s": [s.context for s in samples],
    }
    return least_squares(columns, [s.seconds for s in samples])


def moves(samples: Sequence[MoveSample], waits_s: Sequence[float]) -> Fit:
    """`latency_s` and `token_s` of handoffs: what first tokens took beyond `waits_s`, which
    the decode engine takes anyhow. Raises DisaggError if longer prompts did not take longer."""
    columns = {
        "latency_s": [1.0] * len(samples),
        "token_s": [float(s.tokens) for s in samples],
    }
    fit = least_squares(columns, [s.first_s for s in samples], waits_s)
    if fit.speeds["token_s"] <= 0:
        raise DisaggError("--lengths: the handoff of longer prompts took no longer; add longer")
    return fit


def overhead(samples: Sequence[PromptSample]) -> float:
    """Of a request, beyond what the engine counts: the median."""
    return max(0.0, statistics.median(s.client_s - s.engine_s for s in samples))
