"""Losses that ``train.loss`` knows by name, built on what a loss of the user's may use."""

from portable.losses.preferences import DPO, IPO, ORPO, SimPO

__all__ = ["DPO", "IPO", "ORPO", "SimPO"]
