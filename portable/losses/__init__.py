"""Preference losses that ``train.loss`` selects by name.

They are implemented with only the public interface that custom losses also use.
"""

from portable.losses.preferences import DPO, IPO, ORPO, SimPO

__all__ = ["DPO", "IPO", "ORPO", "SimPO"]
