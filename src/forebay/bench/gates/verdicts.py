"""What a gate says: each check with its measured value, its limit and its unit; a gate by the worst of its checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import msgspec

from forebay.bench.environment import Environment


class Outcome(Enum):
    PASS = "pass"
    FAIL = "fail"
    INVALID = "invalid"
    """Nothing can be said: no samples, or the measurement is not what it says it is."""


class Bound(Enum):
    """Which side of the limit passes."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EQUAL = "equal to"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Stable and in English, such as `ttft_p50_change@8`: reports translate it by its part before the `@`."""
    measured: float | None
    """None: there is no sample, and the outcome is INVALID."""
    bound: Bound
    limit: float
    unit: str
    """`s`, `bytes/s`, `ratio`, `tokens/s`, `count`, `bytes`, ..."""
    outcome: Outcome
    why: str = ""
    """For people: what an INVALID lacks, or what a FAIL found."""


def check(name: str, measured: float | None, bound: Bound, limit: float, unit: str, *, invalid: str = "") -> Check:
    """Compare. INVALID without a sample, and where `invalid` says why the sample is not to be believed."""
    if measured is not None and not math.isfinite(measured):
        measured = None
    if invalid or measured is None:
        outcome = Outcome.INVALID
    else:
        passed = {
            Bound.AT_MOST: measured <= limit, Bound.AT_LEAST: measured >= limit, Bound.EQUAL: measured == limit,
        }[bound]  # fmt: skip
        outcome = Outcome.PASS if passed else Outcome.FAIL
    why = invalid or ("" if measured is not None else "there is no sample")
    return Check(name=name, measured=measured, bound=bound, limit=limit, unit=unit, outcome=outcome, why=why)


def worst(checks: Sequence[Check]) -> Outcome:
    """FAIL if any check fails, else INVALID if any is invalid, or if there is none at all."""
    found = {each.outcome for each in checks}
    if Outcome.FAIL in found:
        return Outcome.FAIL
    return Outcome.INVALID if Outcome.INVALID in found or not found else Outcome.PASS


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    gate: str
    """`g1` to `g4`, or the name of another one."""
    outcome: Outcome
    checks: tuple[Check, ...]
    reasons: tuple[str, ...] = ()
    """Why it is INVALID as a whole, or what else a reader has to know."""
    stopped_early: str = ""
    """By stop-loss: why it could not pass any more."""
    began: str
    """ISO 8601, UTC."""
    ended: str
    attempts: tuple[str, ...] = ()
    """When each began. All but the last were interrupted: what they had measured is not part of this result, but for
    a gate that goes on."""
    files: tuple[str, ...] = ()
    """In the bundle, beside the record: what the checks stand on."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A run was begun, or gone on with after it had been interrupted."""

    at: str
    """ISO 8601, UTC."""
    boot: str
    """The kernel's id of this boot: another one after a reboot. Empty where it does not say."""
    forebay: str
    """Version."""
    environment: Environment | None = None
    """As it was then: after a reboot the kernel, a driver or a library may be another one."""


class GatesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a plan."""

    created: str
    title: str
    plan_text: str
    """The TOML as it was read, whole."""
    plan_sha256: str
    planned: tuple[str, ...] = ()
    """Every gate of the plan. Those without a result have not been run yet."""
    results: tuple[GateResult, ...]
    starts: tuple[Start, ...] = ()
    attempts: dict[str, tuple[str, ...]] = {}
    """By gate, when it was begun; also one that has no result yet."""
    environment: Environment
    command: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Every planned gate has a result."""
        return {each.gate for each in self.results} >= set(self.planned)

    @property
    def outcome(self) -> Outcome:
        """FAIL before INVALID before PASS. INVALID as long as a planned gate has no result."""
        found = {each.outcome for each in self.results} | (set() if self.is_whole else {Outcome.INVALID})
        return next((each for each in (Outcome.FAIL, Outcome.INVALID, Outcome.PASS) if each in found), Outcome.INVALID)
