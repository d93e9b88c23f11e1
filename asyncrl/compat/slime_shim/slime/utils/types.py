"""slime's ``Sample``."""

from asyncrl.compat.slime_sample import Sample, SlimeStatus

SampleStatus = SlimeStatus
"""The name before mid-2025."""

__all__ = ["Sample", "SampleStatus"]
