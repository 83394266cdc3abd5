"""Least squares: from measured times of an engine to the speeds of `disagg plan`.

Pure functions. Errors are relative to the measured times, so that short prompts count as much as
long ones. No speed is negative. The result has the residual of every sample.
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
    """A prompt that an engine computed. `engine_s`: from its first step to its first token, by the
    engine's own count; `client_s`: from the request to the answer."""

    tokens: int
    engine_s: float
    client_s: float


@dataclass(frozen=True)
class StepSample:
    """Mean time of a decode step. `context`: tokens of all sequences together."""

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
    """Coefficients by name, none negative, and the relative error of each sample."""

    speeds: Mapping[str, float]
    residuals: Sequence[float]

    @property
    def worst(self) -> float:
        """The largest absolute residual."""
        return max(abs(residual) for residual in self.residuals)

    @property
    def typical(self) -> float:
        """The median absolute residual."""
        return statistics.median(abs(residual) for residual in self.residuals)


def least_squares(
    columns: Mapping[str, Sequence[float]],
    measured: Sequence[float],
    known: Sequence[float] | None = None,
) -> Fit:
    """Coefficients of these columns with the least relative error, none negative.

    The median of the samples of one setting counts, because other work on the machine makes single
    samples slow. `known`: the part of each measured time that needs no explanation. A column whose
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
    raise DisaggError("no column explains the measured times; measure on a quieter machine")


def _medians(values: Floats, of: npt.NDArray[np.intp]) -> Floats:
    """The median of each group; `of` says which each value belongs to."""
    return np.array([np.median(values[of == group]) for group in range(of.max() + 1)])


def prompts(samples: Sequence[PromptSample], step_tokens: int, step_s: float | None = None) -> Fit:
    """`token_s` and `token_context_s` of an engine whose steps take `step_tokens`, and `step_s`
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
    """`latency_s` and `token_s` of handoffs: the time to the first token beyond `waits_s`, which
    decode takes without a handoff. Raises DisaggError if longer prompts did not take longer."""
    columns = {
        "latency_s": [1.0] * len(samples),
        "token_s": [float(s.tokens) for s in samples],
    }
    fit = least_squares(columns, [s.first_s for s in samples], waits_s)
    if fit.speeds["token_s"] <= 0:
        raise DisaggError(
            "--lengths: longer prompts did not take longer to hand off; add longer ones"
        )
    return fit


def overhead(samples: Sequence[PromptSample]) -> float:
    """The median time of a request that the engine does not count."""
    return max(0.0, statistics.median(s.client_s - s.engine_s for s in samples))
