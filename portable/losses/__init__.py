"""Preference losses that ``train.loss`` selects by name. They use only the interface of custom losses."""

from portable.losses.preferences import DPO, IPO, ORPO, SimPO

__all__ = ["DPO", "IPO", "ORPO", "SimPO"]
