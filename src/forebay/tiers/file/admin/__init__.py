"""What an operator asks of a pool, whether or not a store has it open: `forebay pool` and `forebay doctor` call these.

Answers are frozen dataclasses. Roots are directories with a pool marker; anything else is refused with ConfigError.
"""

from forebay.tiers.file.admin.looking import NamespaceListing, RootStat, Usage, Wear, ls, stat, wear
from forebay.tiers.file.admin.proving import scrub, verify
from forebay.tiers.file.admin.removing import Effect, GcLimits, GcReport, PurgeReport, Selection, gc, purge
from forebay.tiers.file.checking import CheckReport, FoundBy, SetAside
from forebay.tiers.file.probe import ProbeItem, ProbeReport, Verdict, probe
from forebay.tiers.file.scrub import ScrubLimits

__all__ = [
    "CheckReport", "Effect", "FoundBy", "GcLimits", "GcReport", "NamespaceListing", "ProbeItem", "ProbeReport",
    "PurgeReport", "RootStat", "ScrubLimits", "Selection", "SetAside", "Usage", "Verdict", "Wear",
    "gc", "ls", "probe", "purge", "scrub", "stat", "verify", "wear",
]  # fmt: skip
